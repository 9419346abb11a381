"""Metrics of a worker for Prometheus. Every worker has a registry of its own; no metric is process-global."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.messages import Span
from services.process.metric_help import help_text

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_ITEMS = (1, 2, 4, 8, 16, 32)
FIGURES: Final = (
    "requests_running",
    "requests_waiting",
    "kv_blocks_usable",
    "kv_blocks_used",
    "kv_blocks_cached",
    "encoder_cache_bytes_capacity",
    "encoder_cache_bytes_used",
    "encoder_output_cache_bytes",
    "encoder_output_cache_bytes_used",
    "encoder_items_open",
    "encoder_queue_items",
    "preprocess_waiting",
    "inputs_pending",
    "offers_open",
    "handoffs_open",
    "prefills_open",
    "outstanding_work_seconds",
)
"""Load and caches of a worker, few enough for every heartbeat."""


class WorkerMetrics(Collector):
    """Histograms filled by the service, and numbers looked up on each scrape."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.stage_seconds = self._histogram("stage_seconds", "Time of one stage of a request.", label="stage")
        self.hop_seconds = self._histogram("handoff_hop_seconds", "Time of one hop of a handoff.", label="hop")
        self.first_token_seconds = self._histogram(
            "time_to_first_token_seconds", "From the arrival of a request at this worker to its first token."
        )
        self.batch_items = self._histogram("encoder_batch_items", "Items per encoder batch.", buckets=_ITEMS)
        self.engine_stats: dict[object, Mapping[str, float]] = {}
        """Last numbers of each engine of the process."""
        self.gauges: dict[str, Callable[[], float]] = {}
        self.tallies: dict[str, Callable[[], Mapping[str, int]]] = {}
        """Counters by outcome: name -> function returning outcome -> count."""
        self.registry.register(self)

    def _histogram(
        self, name: str, what: str, *, label: str | None = None, buckets: tuple[float, ...] = _SECONDS
    ) -> Histogram:
        labels = [label] if label else []
        return Histogram(f"triptych_{name}", what, labels, buckets=buckets, registry=self.registry)

    def observe_spans(self, spans: Iterable[Span]) -> None:
        for span in spans:
            self.stage_seconds.labels(span.stage).observe(max(0.0, span.end_s - span.start_s))

    def figures(self) -> dict[str, float]:
        """Return the metrics that stand in this worker's entry of the registry; those of engines as last told."""
        told = added_up(self.engine_stats.values())
        asked = {name: self.gauges[name]() for name in FIGURES if name in self.gauges}
        values = told | asked
        return {name: float(values[name]) for name in FIGURES if name in values}

    def render(self) -> bytes:
        """Return the Prometheus text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        """Return the numbers of this moment; called by the registry."""
        values = {name: gauge() for name, gauge in self.gauges.items()}
        for name, value in {**added_up(self.engine_stats.values()), **values}.items():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield kind(f"triptych_{name}", help_text(name), value=value)
        for name, tally in self.tallies.items():
            family = CounterMetricFamily(f"triptych_{name}", help_text(name), labels=["outcome"])
            for outcome, count in Tally(tally()).items():
                family.add_metric([outcome], count)
            yield family


def added_up(stats: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Merge the numbers of several engines: bytes of the same name add up, else the last engine counts."""
    total: dict[str, float] = {}
    for name, value in (item for numbers in stats for item in numbers.items()):
        total[name] = value + (total.get(name, 0) if name.endswith("_bytes") else 0)
    return total
