"""Metrics of a decoder engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engine.attention.metadata import cross_plans_reused
from engine.core.encoder_engine import encoder_computations
from engine.handoff.input_receiver import InputReceiver
from engine.handoff.kv_receiver import KvReceiver
from engine.runner.decoder import DecoderRunner
from engine.scheduler.decoder import DecoderScheduler


def gauges(
    runner: DecoderRunner, scheduler: DecoderScheduler, input_receiver: InputReceiver, kv_receiver: KvReceiver
) -> dict[str, float]:
    """Return values that rise and fall."""
    blocks, cache, graphs = scheduler.blocks, input_receiver.cache, runner.graphs
    return {
        "requests_running": len(scheduler.running),
        "prefill_limit_tokens": scheduler.pace.last_limit if scheduler.pace is not None else 0,
        "kv_blocks_usable": blocks.pool.num_usable,
        "kv_blocks_free": blocks.num_free,
        "kv_blocks_used": blocks.num_used,
        "kv_blocks_cached": blocks.num_cached,
        "kv_host_blocks_free": blocks.host.num_free,
        "kv_host_blocks_used": blocks.host.num_used,
        "kv_block_bytes": runner.block_bytes,
        "encoder_cache_bytes_capacity": cache.capacity_bytes,
        "encoder_cache_bytes_used": cache.used_bytes,
        "encoder_cache_bytes_peak": cache.peak_bytes,
        "encoder_cache_references": cache.num_references,
        "inputs_pending": len(input_receiver.pending),
        "inputs_granted": len(input_receiver.granted),
        "kv_offers_pending": len(kv_receiver.pending),
        "early_offers": len(input_receiver.early) + len(kv_receiver.early),
        "kv_reserved_requests": len(kv_receiver.reserved),
        "steps_recorded": len(graphs.sizes) if graphs is not None else 0,
        "weight_bytes": runner.load_report.parameter_bytes,
        "attention_fallback": int(runner.backend.is_fallback),
        "layers_fallback": int(runner.layers_are_fallback),
        "adapters_loaded": 0 if runner.adapters is None else len(runner.adapters.loaded),
        "encoder_computations": encoder_computations.value,
        **runner.memory.stats(),
    }


def totals(
    runner: DecoderRunner, input_receiver: InputReceiver, kv_receiver: KvReceiver, counters: Iterable[Mapping[str, int]]
) -> dict[str, float]:
    """Return values that only grow: the `counters` of the parts, and more."""
    counts = {name: value for each in counters for name, value in each.items()}
    counts |= {} if runner.adapters is None else runner.adapters.counters
    early = input_receiver.early, kv_receiver.early
    counts |= {
        "steps_replayed": 0 if runner.graphs is None else runner.graphs.num_replays,
        "cross_plans_reused": cross_plans_reused.value,
        "encoder_cache_evictions": input_receiver.cache.evictions,
        "encoder_cache_hits": input_receiver.cache.hits,
        "early_offers_expired": sum(offers.num_expired for offers in early),
        "early_offers_evicted": sum(offers.num_evicted for offers in early),
    }
    return {f"{name}_total": float(value) for name, value in counts.items()}
