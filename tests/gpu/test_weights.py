"""Quantised weights and adapters on the GPU: no further from float32 than a CPU in bfloat16 with the weights that they
stand for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from engine.llm import LLM
from tests.engine.models.quantised.packing import quantise_folder
from tests.engine.models.quantised.test_checkpoints import FORMATS
from tests.equality.adapters import make_adapters, mixed_cases
from tests.equality.cases import Case, CasesOf, FolderOf, ReferenceOf
from tests.gpu import fast_path
from tests.gpu.device import needs_gpu
from tests.gpu.test_engine import check_strayed, logprobs

pytestmark = needs_gpu
DTYPE = "bfloat16"


@pytest.mark.parametrize("name", FORMATS)
def test_quantised_weights_are_what_their_codes_stand_for(
    name: str, folder_of: FolderOf, cases_of: CasesOf, tmp_path: Path
) -> None:
    config, pack = FORMATS[name]
    exact = quantise_folder(folder_of("llama"), tmp_path / "model", config, pack, ())
    half, sure = (LLM(exact, device="cpu", dtype=dtype) for dtype in (DTYPE, "float32"))
    with fast_path.fast_llm(tmp_path / "model", DTYPE) as llm:
        check(llm, half, sure, cases_of("llama"))


def test_weights_of_8_bits_made_at_load_are_replayed(folder_of: FolderOf, cases_of: CasesOf) -> None:
    """What they change shows: answers are those of such weights, not of the checkpoint's."""
    folder, batch = folder_of("llama"), fast_path.batch_of(cases_of("llama"), 4)
    with fast_path.fast_llm(folder, DTYPE, quantization="int8") as llm:
        got = fast_path.answer(llm, batch, logprobs=0)
        assert llm.decoder.stats()["steps_replayed_total"] > 0
    small, plain = (LLM(folder, device="cpu", dtype="float32", quantization=kind) for kind in ("int8", None))
    strayed = [np.abs(got.logprobs - fast_path.opinion(one, batch, got.tokens).logprobs) for one in (small, plain)]
    assert strayed[0].mean() < strayed[1].mean()


def test_rows_of_many_adapters_share_steps(folder_of: FolderOf, reference_of: ReferenceOf, tmp_path: Path) -> None:
    adapters = make_adapters(reference_of("llama"), tmp_path)
    cases = mixed_cases("llama", reference_of("llama"), adapters)
    half, sure = (
        LLM(folder_of("llama"), device="cpu", dtype=dtype, lora_modules=adapters) for dtype in (DTYPE, "float32")
    )
    with fast_path.fast_llm(folder_of("llama"), DTYPE, lora_modules=adapters) as llm:
        check(llm, half, sure, cases)


def check(llm: LLM, half: LLM, sure: LLM, cases: Sequence[Case]) -> None:
    exact = logprobs(sure, cases)
    rounding, ours = (np.abs(logprobs(one, cases) - exact) for one in (half, llm))
    assert ours.mean() > 0, "as from a copy"
    check_strayed(ours, rounding)
