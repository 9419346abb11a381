"""Every number that a worker exports says what it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from common.config import EngineConfig, Settings
from common.model_info import load_model_info
from engine.core.decoder_engine import DecoderEngine
from engine.core.encoder_engine import EncoderEngine
from services.process.metric_help import HELP
from services.process.metrics import FIGURES, WorkerMetrics
from services.roles.decoder import DecodeService, EncodePrefillDecodeService, PrefillDecodeService
from services.roles.encoder import EncoderService
from services.roles.prefill import PrefillService
from services.worker_context import RoleService, WorkerContext
from services.worker_process import WorkerProcess
from tools.house.pages import REFERENCE


@pytest.mark.parametrize("engine", [DecoderEngine, EncoderEngine])
def test_the_engines_numbers_have_help_texts(engine: type[DecoderEngine] | type[EncoderEngine]) -> None:
    stats = engine(load_model_info("signpost"), EngineConfig(num_threads=1, kv_cache_bytes=2**20), "w0").stats()
    missing = {name for name in stats if name not in HELP}
    assert not missing, f"no help text in services/process/metric_help.py: {sorted(missing)}"
    metrics = WorkerMetrics()
    metrics.engine_stats[engine] = stats
    page = metrics.render().decode()
    for name in stats:
        kind = "counter" if name.endswith("_total") else "gauge"
        assert f"# HELP triptych_{name} {HELP[name]}\n# TYPE triptych_{name} {kind}\n" in page


def test_what_two_engines_of_a_process_take_adds_up() -> None:
    metrics = WorkerMetrics()
    metrics.engine_stats["encoder"] = {"memory_weights_bytes": 10, "memory_budget_given": 0, "encoder_queue_items": 2}
    metrics.engine_stats["decoder"] = {"memory_weights_bytes": 30, "memory_budget_given": 1}
    page = metrics.render().decode().splitlines()
    assert "triptych_memory_weights_bytes 40.0" in page
    assert "triptych_memory_budget_given 1.0" in page
    assert "triptych_encoder_queue_items 2.0" in page


def test_the_figures_of_the_registry_are_metrics_and_fit_every_heartbeat() -> None:
    assert set(FIGURES) <= HELP.keys()
    metrics = WorkerMetrics()
    metrics.engine_stats["decoder"] = {"requests_running": 3, "kv_block_bytes": 512}
    metrics.gauges["offers_open"] = lambda: 2
    assert metrics.figures() == {"requests_running": 3.0, "offers_open": 2.0}


def test_help_texts_are_sentences() -> None:
    assert all(not text[0].islower() and text.endswith(".") for text in HELP.values())


ROLES = (EncoderService, PrefillService, DecodeService, PrefillDecodeService, EncodePrefillDecodeService)


@pytest.mark.parametrize("role", ROLES)
async def test_a_workers_own_numbers_have_help_texts(role: Callable[[WorkerContext], RoleService]) -> None:
    settings = Settings(broker="redis://127.0.0.1:1", port=0, instance_id="w0")
    shell = WorkerProcess(settings, load_model_info("signpost"), "float32", role)
    try:
        metrics = shell._context.metrics
        missing = {name for name in (*metrics.gauges, *metrics.tallies) if name not in HELP}
        assert not missing, f"no help text in services/process/metric_help.py: {sorted(missing)}"
        page = (REFERENCE / "metrics.md").read_text()
        for name in metrics.gauges:
            kind = "counter" if name.endswith("_total") else "gauge"
            assert f"\n| `triptych_{name}` | {kind} |" in page
        assert all(f"\n| `triptych_{name}_total` | counter |" in page for name in metrics.tallies)
        assert all("by outcome" in HELP[name] for name in metrics.tallies), "their label is `outcome`"
    finally:
        await shell._close()
