"""Counts of this process: what should stay at zero, and what should not."""

from __future__ import annotations

import threading


class Counter:
    """A number that only grows; safe from any thread."""

    def __init__(self) -> None:
        self._value = 0
        self._lock = threading.Lock()

    def add(self, count: int = 1) -> None:
        with self._lock:
            self._value += count

    @property
    def value(self) -> int:
        return self._value


encoder_computations = Counter()
"""Items that an encoder has computed in this process. A prefill-decode worker exports it: it must stay 0."""

cross_plans_reused = Counter()
"""Steps, and their decodes and prefills apart, whose cross-attention was not planned anew: the batch was the same."""
