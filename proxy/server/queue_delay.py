"""How long a request that comes now would wait for its first token, and whether that is too long.

Requests wait in a line from their admission to their first token; one of several jobs, as a recording or a list of
prompts is, waits there with each that has been sent off. The line moves at the rate at which they have begun while
others waited; its length over that rate is the wait of a newcomer. One that would wait longer than is wanted is
refused at once, before anything is done for it: so those that were let in are still answered in time, where
an endless line would be too late for everybody.

A line that is only just there is a burst, and taken in whole: as in CoDel (Nichols and Jacobson, 2012), what does harm
is a line that stands.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Final

SHORT_LINE: Final = 4
"""So many may always wait."""
FULL_LINE: Final = 8
"""Jobs that can wait for others join no longer one, and none by which a newcomer would wait longer than half of what is
wanted."""
WINDOW: Final = 64
"""Begins by which the rate is measured, while at least SHORT_LINE wait; it is not known before a quarter of them."""
FORGET_S: Final = 10.0
"""After so long with fewer the rate has to be measured again: workers come and go."""


class QueueDelayLimiter:
    """The requests that have been admitted and have no token yet, and the further jobs of such with several."""

    def __init__(self, max_wait_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._intervals: deque[float] = deque(maxlen=WINDOW)
        self._short_since_s = -math.inf
        self._standing_since_s = 0.0  # longer than SHORT_LINE, but for moments
        self._idle_since_s = -math.inf
        self._counting_since_s = 0.0  # the last begin of at least SHORT_LINE
        self._moved = asyncio.Event()
        self.num_waiting = 0

    @property
    def wait_s(self) -> float:
        """The expected wait of a request that comes now; 0 where nothing is known of it."""
        return self._expected_s(self.num_waiting + 1) if self.num_waiting > SHORT_LINE else 0.0

    @property
    def has_room(self) -> bool:
        """Whether a job that can wait for others should join now."""
        if self.num_waiting < SHORT_LINE:
            return True
        return self.num_waiting < FULL_LINE and self._expected_s(self.num_waiting + 2) <= self._max_wait_s / 2

    @property
    def excess_s(self) -> float:
        """By how much a newcomer would wait too long; 0 or less where it is welcome."""
        if self.num_waiting <= SHORT_LINE or self._clock() - self._standing_since_s < self._max_wait_s:
            return 0.0
        return self.wait_s - self._max_wait_s

    def join(self) -> Ticket:
        """One more waits."""
        self.num_waiting += 1
        if self.num_waiting == SHORT_LINE:
            self._start_counting()
        elif self.num_waiting == SHORT_LINE + 1 and self._clock() - self._short_since_s > self._max_wait_s:
            self._standing_since_s = self._clock()
        return Ticket(self)

    def begun(self) -> None:
        """One that waits has its first token."""
        if self.num_waiting >= SHORT_LINE:
            now_s = self._clock()
            self._intervals.append(now_s - self._counting_since_s)
            self._counting_since_s = now_s
        self.left()

    def left(self) -> None:
        """One waits no more."""
        self.num_waiting -= 1
        if self.num_waiting == SHORT_LINE:
            self._short_since_s = self._clock()
        elif self.num_waiting == SHORT_LINE - 1:
            self._idle_since_s = self._clock()
        self._moved.set()
        self._moved = asyncio.Event()

    async def moves(self) -> None:
        """Return once one waits no more."""
        await self._moved.wait()

    def _expected_s(self, num_waiting: int) -> float:
        """How long the last of so many waits; 0 where nothing is known of it."""
        known = len(self._intervals)
        return num_waiting * sum(self._intervals) / known if known >= WINDOW // 4 else 0.0

    def _start_counting(self) -> None:
        self._counting_since_s = now_s = self._clock()
        if now_s - self._idle_since_s > FORGET_S:
            self._intervals.clear()


class Ticket:
    """The place of a request, or of one of its jobs, in a line."""

    def __init__(self, line: QueueDelayLimiter) -> None:
        self._line = line
        self.waits = True

    def begin(self) -> None:
        """It has its first token; once is enough."""
        if self.waits:
            self.waits = False
            self._line.begun()

    def leave(self) -> None:
        """It ends, if it has not begun before."""
        if self.waits:
            self.waits = False
            self._line.left()


class RequestTickets:
    """Those of one request in its line: from the beginning one for each job that is known of, then one for each further
    job that waits."""

    def __init__(self, line: QueueDelayLimiter, num_jobs: int = 1) -> None:
        self.line = line
        self._free = [line.join() for _ in range(num_jobs)]
        self._taken: list[Ticket] = []

    @property
    def num_waiting(self) -> int:
        """Jobs that have been sent off and have no token yet."""
        return sum(place.waits for place in self._taken)

    def take(self) -> Ticket:
        """The place of a job that is sent off now."""
        self._taken = [place for place in self._taken if place.waits]
        self._taken.append(self._free.pop() if self._free else self.line.join())
        return self._taken[-1]

    def leave(self) -> None:
        """The request ends."""
        for place in (*self._free, *self._taken):
            place.leave()


def retry_after_s(excess_s: float) -> int:
    """Whole seconds after which a refused request may come back, at least 1."""
    return max(1, math.ceil(excess_s))
