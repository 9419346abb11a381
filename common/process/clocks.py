"""Time as lived by this process, to judge the silence of other processes."""

from __future__ import annotations

import time
from collections.abc import Callable


class AwakeClock:
    """A count of the seconds in which this process runs, given frequent looks.

    A process that was stopped (SIGSTOP, a machine that sleeps) or found no core must not take its own absence for
    somebody else's: of the time between two looks no more than `max_gap_s` counts.
    """

    def __init__(self, max_gap_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_gap_s = max_gap_s
        self._clock = clock
        self._looked_s = clock()
        self._awake_s = 0.0

    def look(self) -> float:
        """Return the seconds so far."""
        now_s = self._clock()
        self._awake_s += min(now_s - self._looked_s, self._max_gap_s)
        self._looked_s = now_s
        return self._awake_s
