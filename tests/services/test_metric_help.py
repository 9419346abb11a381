"""Every number that a worker exports says what it is."""

from __future__ import annotations

import pytest

from common.config import EngineConfig
from common.model_info import load_model_info
from engine.decoder_engine import DecoderEngine
from engine.encoder_engine import EncoderEngine
from services.metric_help import HELP
from services.metrics import WorkerMetrics


@pytest.mark.parametrize("engine", [DecoderEngine, EncoderEngine])
def test_the_engines_numbers_have_help_texts(engine: type[DecoderEngine] | type[EncoderEngine]) -> None:
    stats = engine(load_model_info("signpost"), EngineConfig(num_threads=1, kv_cache_bytes=2**20), "w0").stats()
    assert {name for name in stats if name not in HELP} == set()
    metrics = WorkerMetrics()
    metrics.engine_stats = stats
    page = metrics.render().decode()
    for name in stats:
        kind = "counter" if name.endswith("_total") else "gauge"
        assert f"# HELP triptych_{name} {HELP[name]}\n# TYPE triptych_{name} {kind}\n" in page


def test_help_texts_are_sentences() -> None:
    assert all(not text[0].islower() and text.endswith(".") for text in HELP.values())
