"""A measured figure beside its limit."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

HEADER: Final = ("benchmark", "case", "median", "spread", "limit", "share of limit", "beside it")
_MOST_WORDS: Final = 300
"""Characters of an error in a cell."""


@dataclass(frozen=True)
class Figure:
    """One number: `value` is the median of repetitions, `low` and `high` the extremes, in `unit`.

    `limit` is what the machine would allow, in the same unit, and `share` how near the figure comes to it: 1 is the
    limit; both are None where there is none to name. `goal` is the share that is to be reached, where there is one.
    `beside` says what else is to be known. With `failed` there is no number, and `beside` says why.

    `attention` names whose attention was measured, empty where there was none; with `is_fallback` something better
    would have computed it, had it been able to run.
    """

    benchmark: str
    case: str
    unit: str
    value: float
    low: float
    high: float
    limit: float | None = None
    share: float | None = None
    beside: str = ""
    failed: bool = False
    goal: float | None = None
    attention: str = ""
    is_fallback: bool = False

    def cells(self) -> list[str]:
        """Return a row of the table that HEADER begins."""
        if self.failed:
            return [self.benchmark, self.case, "failed", "–", "–", "–", self.beside]
        limit = "–" if self.limit is None else f"{self.limit:.4g} {self.unit}"
        share = "–" if self.share is None else f"{self.share:.0%}{self._verdict(self.share)}"
        attention = f"attention by {self.attention}{', A FALLBACK' if self.is_fallback else ''}"
        beside = "; ".join(filter(None, [self.beside, attention if self.attention else ""]))
        figure = [f"{self.value:.4g} {self.unit}", f"{self.low:.4g}–{self.high:.4g}"]
        return [self.benchmark, self.case, *figure, limit, share, beside or "–"]

    def _verdict(self, share: float) -> str:
        if self.goal is None:
            return ""
        return f", goal {self.goal:.0%} {'reached' if share >= self.goal else 'missed'}"


def duration(
    benchmark: str,
    case: str,
    seconds: Sequence[float],
    limit_s: float | None = None,
    beside: str = "",
    goal: float | None = None,
) -> Figure:
    """Return how long something took, in milliseconds; the limit is the least that it could take."""
    times = [one * 1e3 for one in seconds]
    value, limit_ms = statistics.median(times), None if limit_s is None else limit_s * 1e3
    share = None if limit_ms is None else limit_ms / value
    return Figure(benchmark, case, "ms", value, min(times), max(times), limit_ms, share, beside, goal=goal)


def durations(benchmark: str, case: str, seconds: Sequence[float], limit_s: float | None = None) -> Figure:
    """Return how long many single events took, in milliseconds; the 99th percentile stands beside the median."""
    ranked = sorted(seconds)
    p99 = ranked[min(len(ranked) - 1, math.ceil(0.99 * len(ranked)) - 1)]
    return duration(benchmark, case, ranked, limit_s, f"p99 {p99 * 1e3:.4g} ms of {len(ranked)}")


def rate(
    benchmark: str,
    case: str,
    unit: str,
    seconds: Sequence[float],
    amount: float,
    limit: float | None = None,
    beside: str = "",
) -> Figure:
    """Return how much of `unit` was done in a second: `amount` of it in each time; `limit` is the most."""
    rates = [amount / one for one in seconds]
    value = statistics.median(rates)
    share = None if limit is None else value / limit
    return Figure(benchmark, case, unit, value, min(rates), max(rates), limit, share, beside)


def failure(benchmark: str, case: str, error: Exception) -> Figure:
    """Stand in the place of a figure that could not be measured. The error's words fit into a cell of a table."""
    words = " ".join(f"{type(error).__name__}: {error}".replace("|", "/").split())
    return Figure(benchmark, case, "", 0.0, 0.0, 0.0, beside=words[:_MOST_WORDS], failed=True)
