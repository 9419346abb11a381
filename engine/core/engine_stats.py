"""Metrics of a decoder engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.attention.metadata import cross_plans_reused
from engine.core.encoder_batches import encoder_computations

if TYPE_CHECKING:
    from engine.core.decoder_engine import DecoderEngine


def gauges(engine: DecoderEngine) -> dict[str, float]:
    """Return values that rise and fall."""
    blocks, cache, graphs = engine.blocks, engine.cache, engine.runner.graphs
    return {
        "requests_running": len(engine.scheduler.running),
        "requests_waiting": len(engine.scheduler.waiting),
        "kv_blocks_usable": blocks.pool.num_usable,
        "kv_blocks_free": blocks.num_free,
        "kv_blocks_used": blocks.num_used,
        "kv_blocks_cached": blocks.num_cached,
        "kv_host_blocks_free": blocks.num_host_free,
        "kv_host_blocks_used": blocks.host.num_used,
        "kv_block_bytes": engine.runner.block_bytes,
        "encoder_cache_bytes_capacity": cache.capacity_bytes,
        "encoder_cache_bytes_used": cache.used_bytes,
        "encoder_cache_bytes_peak": cache.peak_bytes,
        "encoder_cache_references": cache.num_references,
        "inputs_pending": engine.intake.num_pending,
        "inputs_granted": engine.intake.num_granted,
        "kv_offers_pending": engine.kv_intake.num_pending,
        "early_offers": len(engine.intake.early) + len(engine.kv_intake.early),
        "kv_reserved_requests": engine.kv_intake.num_reserved,
        "last_step_tokens": engine.loop.last_step_tokens,
        "steps_recorded": len(graphs.sizes) if graphs is not None else 0,
        "weight_bytes": engine.runner.load_report.parameter_bytes,
        "attention_fallback": int(engine.runner.backend.is_fallback),
        "layers_fallback": int(engine.runner.layers_are_fallback),
        "encoder_computations": encoder_computations.value,
        **engine.runner.memory.stats(),
    }


def totals(engine: DecoderEngine) -> dict[str, float]:
    """Return values that only grow."""
    counts = {
        **engine.counters,
        **engine.loop.counters,
        **engine.emission.counters,
        **engine.intake.counters,
    }
    counts |= {**engine.kv_intake.counters, **engine.kv_outlet.counters}
    counts |= {**engine.scheduler.counters, **engine.blocks.counters, **engine.coverage.counters}
    graphs = engine.runner.graphs
    counts |= {"steps_replayed": 0 if graphs is None else graphs.num_replays}
    counts |= {"cross_plans_reused": cross_plans_reused.value}
    counts |= {"encoder_cache_evictions": engine.cache.evictions, "encoder_cache_hits": engine.cache.hits}
    early = engine.intake.early, engine.kv_intake.early
    counts |= {"early_offers_expired": sum(offers.num_expired for offers in early)}
    counts |= {"early_offers_evicted": sum(offers.num_evicted for offers in early)}
    return {f"{name}_total": float(value) for name, value in counts.items()}
