"""Running clusters for rounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from common.model_info import BUNDLED
from tests.chaos.asks import picture_asks, speech_asks
from tests.chaos.harness import ChaosHarness, arena
from tests.tiny_models import make_whisper

WIDE: Final = {"d_model": 704, "encoder_layers": 1, "decoder_layers": 1}
"""Whisper's settings for outputs of 4.2 MB: over ZMQ they travel in pieces, between processes of a host in memory that
is given."""
WIDE_CACHES: Final = {"kv_cache_bytes": 128 * 2**20, "encoder_cache_bytes": 10 * 2**20}
"""Room for two outputs, as the others have, and for cross-attention's keys and values of fifteen."""


@pytest.fixture(scope="module")
def arena_of(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[ChaosHarness]:
    """A running cluster, by `family topology transport`."""
    family, topology, transport = request.param.split()
    folder = tmp_path_factory.mktemp("temporary")
    if family in ("whisper", "wide"):
        sizes, caches = (WIDE, WIDE_CACHES) if family == "wide" else ({}, {})
        model = make_whisper(tmp_path_factory.mktemp("models") / family, max_target_positions=160, **sizes)
        with arena(folder, str(model), topology, speech_asks, transport=transport, **caches) as ready:
            yield ready
    else:
        with arena(folder, str(BUNDLED / family), topology, picture_asks, transport=transport) as ready:
            yield ready
