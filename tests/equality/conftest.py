"""Small random checkpoints of every family and what transformers answers: made once for all tests here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from broker.cluster.embedded import EmbeddedBroker
from common.model_info import BUNDLED
from tests import tiny_models
from tests.equality.cases import CasesOf, FolderOf, ReferenceOf, make_cases
from tests.equality.references import Reference
from tests.tiny import encdec, florence2, gemma3, llava, mllama, qwen, text
from tests.weights.fixtures import smollm2, whisper_tiny_en

__all__ = ["smollm2", "whisper_tiny_en"]

MAKERS = {
    "llama": tiny_models.make_llama,
    "qwen2": tiny_models.make_qwen2,
    "qwen3": text.make_qwen3,
    "mistral": text.make_mistral,
    "gemma3_text": gemma3.make_gemma3_text,
    "gemma3": gemma3.make_gemma3,
    "qwen2_5_vl": tiny_models.make_qwen2_5_vl,
    "qwen2_vl": qwen.make_qwen2_vl,
    "qwen3_vl": qwen.make_qwen3_vl,
    "qwen2_audio": qwen.make_qwen2_audio,
    "qwen3_asr": qwen.make_qwen3_asr,
    "mllama": mllama.make_mllama,
    "llava": llava.make_llava,
    "llava_siglip": partial(llava.make_llava, siglip=True),
    "llava_next": llava.make_llava_next,
    "idefics3": llava.make_idefics3,
    "smolvlm": partial(llava.make_idefics3, smolvlm=True),
    "whisper": tiny_models.make_whisper,
    "florence2": florence2.make_florence2,
    "bart": encdec.make_bart,
    "mbart": encdec.make_mbart,
    "t5": encdec.make_t5,
    "flan_t5": encdec.make_flan_t5,
}


@pytest.fixture(scope="session")
def makers() -> dict[str, Callable[..., Path]]:
    """Functions that write a tiny model, by family."""
    return MAKERS


@pytest.fixture(scope="session")
def folder_of(makers: dict[str, Callable[..., Path]], tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    """The folder of a tiny model by family, or of a bundled model."""

    @cache
    def make(name: str) -> Path:
        if name in ("signpost", "numerals"):
            return BUNDLED / name
        return makers[name](tmp_path_factory.mktemp(name) / f"tiny-{name}")

    return make


@pytest.fixture(scope="session")
def reference_of(folder_of: FolderOf) -> ReferenceOf:
    """transformers with the same model."""
    return cache(lambda name: Reference(folder_of(name)))


@pytest.fixture(scope="session")
def cases_of(reference_of: ReferenceOf) -> CasesOf:
    """Requests for a model, with transformers' answers."""
    return cache(lambda name: make_cases(name, reference_of(name)))


@pytest.fixture(scope="session")
def broker_url() -> Iterator[str]:
    """One Redis-protocol server for all clusters; each has its own key prefix."""
    with EmbeddedBroker() as url:
        yield url


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Tiny models gain nothing from threads, and other processes of the same tests need the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
