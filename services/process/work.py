"""Seconds of outstanding work: the load by which a role is scaled, in the same unit for every role and model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FADE: Final = 0.99
"""Weight of the past at each look, once a second: some hundred seconds count, and idle ones not at all."""


@dataclass
class WorkMeter:
    """Rate of a worker: engine seconds per unit of work (tokens at most, or items), over requests that ended lately.

    Measured in the unit of the open requests, the rate includes answers that end early, and what batching saves.
    """

    _worked_s: float = 0.0
    _ended: float = 0.0
    _seen: tuple[float, float] = (0.0, 0.0)

    def look(self, worked_s: float, ended: float, *, idle: bool = False) -> None:
        """Note the engine's seconds and ended work since the start. Seconds of an `idle` worker go to metrics."""
        before_s, before = self._seen
        self._seen = worked_s, ended
        if ended == before and (idle or worked_s == before_s):
            return
        self._worked_s = FADE * self._worked_s + worked_s - before_s
        self._ended = FADE * self._ended + ended - before

    def seconds_of(self, work: float) -> float:
        """Return how long this worker needs for `work`; 0 before any request has ended."""
        return work * self._worked_s / self._ended if self._ended > 0 else 0.0
