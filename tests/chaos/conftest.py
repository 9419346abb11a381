"""Running clusters for rounds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common.model_info import BUNDLED
from tests.chaos.arena import Arena, arena
from tests.chaos.asks import picture_asks, speech_asks
from tests.tiny_models import make_whisper


@pytest.fixture(scope="module")
def arena_of(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Arena]:
    """A running cluster, by `family topology transport`."""
    family, topology, transport = request.param.split()
    folder = tmp_path_factory.mktemp("temporary")
    if family == "whisper":
        model = make_whisper(tmp_path_factory.mktemp("models") / "tiny-whisper", max_target_positions=160)
        with arena(folder, str(model), topology, speech_asks, transport=transport) as ready:
            yield ready
    else:
        with arena(folder, str(BUNDLED / family), topology, picture_asks, transport=transport) as ready:
            yield ready
