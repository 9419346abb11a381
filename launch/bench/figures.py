"""Figures of a run, by the definitions of NVIDIA's AIPerf (its documentation, "Metrics reference").

- time to first token: from sending a request to the first piece of the answer with text;
- request latency: from sending a request to the last piece with text; to the answer's end where it comes whole;
- inter-token latency: (request latency - time to first token) / (output tokens - 1), of each request;
- output token throughput per user: 1 / inter-token latency;
- output token throughput: all output tokens / (last end - first begin); request throughput likewise;
- goodput: requests per second that meet every objective.

Failed requests count as failures alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from common.errors import invalid
from launch.cli.client import ClientResult

METRICS: Final = {
    "time_to_first_token": "ms",
    "inter_token_latency": "ms",
    "request_latency": "ms",
    "output_tokens": "tokens",
    "output_token_throughput_per_user": "tokens/s",
}
"""Metrics of a request, with units."""
OBJECTIVES: Final = tuple(name for name, unit in METRICS.items() if unit == "ms")
STATISTICS: Final = ("avg", "min", "p50", "p90", "p99", "max")


@dataclass(frozen=True)
class Run:
    """All results at one level of load."""

    level: str
    results: Sequence[ClientResult]
    objectives: Mapping[str, float] = field(default_factory=dict)
    """Largest values in ms by metric, for the goodput."""
    lag_s: float = 0.0

    @property
    def good(self) -> list[ClientResult]:
        """The results without an error."""
        return [result for result in self.results if result.error is None]

    @property
    def duration_s(self) -> float:
        """From the first begin to the last end of a request that succeeded; 0 without any."""
        ends = [result.began + result.latency_s for result in self.good]
        return max(ends) - min(result.began for result in self.good) if ends else 0.0

    def values(self, metric: str) -> list[float]:
        """Return a metric's values, of the requests that have one."""
        values = (of_request(result)[metric] for result in self.good)
        return [value for value in values if value is not None]

    def to_json(self) -> dict[str, Any]:
        """Return the run for the export: summary, statistics, errors, and a record per request."""
        first = min((result.began for result in self.results), default=0.0)
        return {
            "level": self.level,
            "requests": len(self.results),
            "failed": len(self.results) - len(self.good),
            "duration_s": self.duration_s,
            "request_throughput": self._per_s(len(self.good)),
            "output_token_throughput": self._per_s(sum(self.values("output_tokens"))),
            "goodput": self._per_s(self._num_within()) if self.objectives else None,
            "objectives_ms": dict(self.objectives),
            "schedule_lag_s": self.lag_s,
            "metrics": {name: {"unit": unit, **statistics(self.values(name))} for name, unit in METRICS.items()},
            "errors": dict(Counter(result.error for result in self.results if result.error is not None)),
            "records": [
                {"begin_s": result.began - first, **of_request(result), "error": result.error}
                for result in self.results
            ],
        }

    def _per_s(self, count: float) -> float:
        return count / self.duration_s if self.duration_s else 0.0

    def _num_within(self) -> int:
        """Return how many requests meet every objective; a metric that a request lacks is met by none."""
        figures, most = [of_request(result) for result in self.good], self.objectives
        return sum(all((value := one[name]) is not None and value <= most[name] for name in most) for one in figures)


def of_request(result: ClientResult) -> dict[str, float | None]:
    """Return the metrics of a request; None where its answer does not give them, as a rate without tokens."""
    tokens, first_s, last_s = result.completion_tokens, result.ttft_s, result.last_text_s or result.latency_s
    between = None
    if tokens is not None and tokens > 1 and first_s is not None:
        between = 1000 * (last_s - first_s) / (tokens - 1)
    values = (None if first_s is None else 1000 * first_s, between, 1000 * last_s, tokens)
    return dict(zip(METRICS, (*values, 1000 / between if between else None), strict=True))


def statistics(values: Sequence[float]) -> dict[str, float | None]:
    """Return mean, extremes and percentiles; each None without values."""
    if not values:
        return dict.fromkeys(STATISTICS)
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    found = (np.mean(values), min(values), p50, p90, p99, max(values))
    return {name: float(value) for name, value in zip(STATISTICS, found, strict=True)}


def parse_objectives(text: str) -> dict[str, float]:
    """Read `time_to_first_token:500 inter_token_latency:50`, as AIPerf's --goodput; milliseconds.

    Raises TriptychError("invalid_request") naming the wrong part.
    """
    objectives = {}
    for part in text.split():
        name, _, value = part.partition(":")
        try:
            objectives[name] = float(value)
            usable = name in OBJECTIVES and 0 < objectives[name] < float("inf")
        except ValueError:
            usable = False
        if not usable:
            known = ", ".join(OBJECTIVES)
            raise invalid(f"goodput has {part!r}: should be NAME:MILLISECONDS, names are {known}", "goodput")
    return objectives
