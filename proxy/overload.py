"""How long a request that comes now would wait for its first token, and whether that is too long.

Requests wait in a line from their admission to their first token. The line moves at the rate at which requests have
begun while others waited; its length over that rate is the wait of a newcomer. One that would wait longer than is
wanted is refused at once, before anything is done for it: so those that were let in are still answered in time, where
an endless line would be too late for everybody.

A line that is only just there is a burst, and taken in whole: as in CoDel (Nichols and Jacobson, 2012), what does harm
is a line that stands.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Final

SHORT_LINE: Final = 4
"""So many may always wait."""
WINDOW: Final = 64
"""Begins by which the rate is measured; it is not known before a quarter of them."""
FORGET_S: Final = 10.0
"""After so long with a short line the rate has to be measured again: workers come and go."""


class Line:
    """The requests that have been admitted and have no token yet."""

    def __init__(self, max_wait_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._intervals: deque[float] = deque(maxlen=WINDOW)
        self._long = False  # more than SHORT_LINE wait
        self._short_since_s = -math.inf
        self._standing_since_s = 0.0  # but for moments
        self._counting_since_s = 0.0  # the last begin of a long line
        self.num_waiting = 0

    @property
    def wait_s(self) -> float:
        """The expected wait of a request that comes now; 0 where nothing is known of it."""
        if not self._long or len(self._intervals) < WINDOW // 4:
            return 0.0
        return (self.num_waiting + 1) * sum(self._intervals) / len(self._intervals)

    @property
    def excess_s(self) -> float:
        """By how much a newcomer would wait too long; 0 or less where it is welcome."""
        if not self._long or self._clock() - self._standing_since_s < self._max_wait_s:
            return 0.0
        return self.wait_s - self._max_wait_s

    def join(self) -> Place:
        """One more waits."""
        self.num_waiting += 1
        if self.num_waiting > SHORT_LINE and not self._long:
            self._become_long(self._clock())
        return Place(self)

    def begun(self) -> None:
        """One that waits has its first token."""
        if self._long:
            now_s = self._clock()
            self._intervals.append(now_s - self._counting_since_s)
            self._counting_since_s = now_s
        self.left()

    def left(self) -> None:
        """One waits no more."""
        self.num_waiting -= 1
        if self.num_waiting <= SHORT_LINE and self._long:
            self._long, self._short_since_s = False, self._clock()

    def _become_long(self, now_s: float) -> None:
        pause_s = now_s - self._short_since_s
        if pause_s > FORGET_S:
            self._intervals.clear()
        if pause_s > self._max_wait_s:
            self._standing_since_s = now_s
        self._long, self._counting_since_s = True, now_s


class Place:
    """One request's place in a line."""

    def __init__(self, line: Line) -> None:
        self._line: Line | None = line

    def begin(self) -> None:
        """It has its first token; once is enough."""
        line, self._line = self._line, None
        if line is not None:
            line.begun()

    def leave(self) -> None:
        """It ends, if it has not begun before."""
        line, self._line = self._line, None
        if line is not None:
            line.left()


def retry_after_s(excess_s: float) -> int:
    """Whole seconds after which a refused request may come back, at least 1."""
    return max(1, math.ceil(excess_s))
