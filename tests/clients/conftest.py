"""Clusters as `triptych serve` starts them, one of a kind for all clients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from tests.launch.cli.serving import Serving
from tests.tiny_models import make_llama
from tests.weights.fixtures import whisper_tiny_en

__all__ = ["whisper_tiny_en"]

STORE = ("--response-store-bytes", "16MiB")


def served(folder: Path, model: str, *arguments: str) -> AbstractContextManager[Serving]:
    return closing(Serving(folder, model, *arguments, "--cluster", folder.name))


@contextmanager
def addresses(**clusters: AbstractContextManager[Serving]) -> Iterator[dict[str, str]]:
    """Start clusters side by side, and give the address of each by its name."""
    with ExitStack() as stack:
        started = {name: stack.enter_context(cluster) for name, cluster in clusters.items()}
        for serving in started.values():
            serving.wait_until("OpenAI API at")
        yield {name: serving.base_url for name, serving in started.items()}


@pytest.fixture(scope="session")
def examples(tmp_path_factory: pytest.TempPathFactory, whisper_tiny_en: Path) -> Iterator[dict[str, str]]:
    """Addresses of a model that sees and of one that hears."""
    folder = tmp_path_factory.mktemp("clients")
    signs = served(folder / "signs", "signpost", "--topology", "1e1p1d", *STORE)
    speech = served(folder / "speech", str(whisper_tiny_en), "--served-model-name", "whisper-tiny.en,whisper-1")
    with addresses(SIGNS_URL=signs, SPEECH_URL=speech) as found:
        yield found


@pytest.fixture(scope="session")
def servers(examples: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The address of a model with random weights and a long context, too."""
    folder = tmp_path_factory.mktemp("chat")
    tiny = make_llama(folder / "model", max_position_embeddings=8192)
    with addresses(CHAT_URL=served(folder / "chat", str(tiny), "--served-model-name", "tiny,small")) as found:
        yield {**examples, **found}
