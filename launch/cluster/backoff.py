"""Delays before dead processes are started again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Backoff:
    """Exponential back-off: doubles with each early death, starts over once a process has lived a while."""

    first_s: float = 0.5
    longest_s: float = 30.0
    healthy_after_s: float = 60.0
    _next_s: float = 0.0

    def after_life_of(self, lived_s: float) -> float:
        """Return the seconds to wait after a process with a life of `lived_s`."""
        early = self._next_s > 0.0 and lived_s < self.healthy_after_s
        delay_s = self._next_s if early else self.first_s
        self._next_s = min(2 * delay_s, self.longest_s)
        return delay_s
