"""Limits under load: memory for bodies and media, and the expected wait for a first token.

Each request reserves bytes before it reads, decodes or fetches them. A reservation that does not fit is refused at
once: waiting requests could wait for each other. All bytes are released when the request ends.

A request waits in a queue from admission to its first token, and with each further job that was sent off. Queue length
over the rate at which waiting requests began is the wait of a new request. A request over the limit is refused at once,
so that admitted requests are answered in time. A new queue is a burst and is admitted whole: as in CoDel (Nichols and
Jacobson, 2012), only a standing queue harms.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from common.errors import TriptychError
from proxy.server.errors import Overloaded
from proxy.server.metrics import ProxyMetrics

SHORT_LINE: Final = 4
"""Requests that may always wait."""
FULL_LINE: Final = 8
"""Longest queue that a job joins if able to wait; the wait of a new request must also stay below half of the limit."""
WINDOW: Final = 64
"""Begins that measure the rate, while at least SHORT_LINE wait. The rate is unknown before a quarter of them."""
FORGET_S: Final = 10.0
"""Time with fewer waiting after which the rate is measured again: workers come and go."""


class ByteBudget:
    """Limit and sum of all reservations."""

    def __init__(self, limit_bytes: int, metrics: ProxyMetrics) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self.metrics = metrics
        metrics.held_bytes.set_function(lambda: self.held_bytes)


@dataclass
class Reservation:
    """Bytes of a request. Call `release` at the end."""

    budget: ByteBudget
    num_bytes: int = 0

    def reserve(self, num_bytes: int) -> None:
        """Reserve more bytes, before they are held.

        Raises Overloaded where other requests hold too much, TriptychError("item_too_large") for a request that could
        never fit.
        """
        budget, wanted = self.budget, self.num_bytes + num_bytes
        if wanted > budget.limit_bytes:
            message = f"the request with its media takes {wanted} bytes or more in memory, the server has room for"
            raise TriptychError("item_too_large", f"{message} {budget.limit_bytes} in all (max_inflight_bytes)")
        if budget.held_bytes + num_bytes > budget.limit_bytes:
            budget.metrics.refused.labels("bytes").inc()
            message = (
                f"{budget.held_bytes} bytes of requests are under way, {num_bytes} more would be over the limit of"
            )
            raise Overloaded(f"{message} {budget.limit_bytes} (max_inflight_bytes); try again shortly")
        budget.held_bytes += num_bytes
        self.num_bytes = wanted

    def release(self, num_bytes: int | None = None) -> None:
        """Release some bytes, or all."""
        freed = self.num_bytes if num_bytes is None else num_bytes
        self.budget.held_bytes -= freed
        self.num_bytes -= freed


class QueueDelayLimiter:
    """The queue of admitted requests without a token, and of the further jobs of such requests."""

    def __init__(self, max_wait_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._intervals: deque[float] = deque(maxlen=WINDOW)
        self._short_since_s = -math.inf
        self._standing_since_s = 0.0  # longer than SHORT_LINE, but for moments
        self._idle_since_s = -math.inf
        self._counting_since_s = 0.0  # the last begin with at least SHORT_LINE waiting
        self._moved = asyncio.Event()
        self.num_waiting = 0

    @property
    def wait_s(self) -> float:
        """Return the expected wait of a new request; 0 where the rate is unknown."""
        return self._expected_s(self.num_waiting + 1) if self.num_waiting > SHORT_LINE else 0.0

    @property
    def has_room(self) -> bool:
        """Whether a job that can wait should join now."""
        if self.num_waiting < SHORT_LINE:
            return True
        return self.num_waiting < FULL_LINE and self._expected_s(self.num_waiting + 2) <= self._max_wait_s / 2

    @property
    def excess_s(self) -> float:
        """Return the expected wait of a new request beyond the limit; 0 or less where the request is welcome."""
        if self.num_waiting <= SHORT_LINE or self._clock() - self._standing_since_s < self._max_wait_s:
            return 0.0
        return self.wait_s - self._max_wait_s

    def join(self) -> Ticket:
        """Add one waiting job."""
        self.num_waiting += 1
        if self.num_waiting == SHORT_LINE:
            self._counting_since_s = now_s = self._clock()
            if now_s - self._idle_since_s > FORGET_S:
                self._intervals.clear()
        elif self.num_waiting == SHORT_LINE + 1 and self._clock() - self._short_since_s > self._max_wait_s:
            self._standing_since_s = self._clock()
        return Ticket(self)

    def exit(self, *, begun: bool) -> None:
        """Remove a waiting job: `begun` with the first token, or ended without."""
        now_s = self._clock()
        if begun and self.num_waiting >= SHORT_LINE:
            self._intervals.append(now_s - self._counting_since_s)
            self._counting_since_s = now_s
        self.num_waiting -= 1
        if self.num_waiting == SHORT_LINE:
            self._short_since_s = now_s
        elif self.num_waiting == SHORT_LINE - 1:
            self._idle_since_s = now_s
        self._moved.set()
        self._moved = asyncio.Event()

    async def moves(self) -> None:
        """Return once a waiting job has left."""
        await self._moved.wait()

    def _expected_s(self, num_waiting: int) -> float:
        """Return the expected wait of the last of `num_waiting`; 0 where the rate is unknown."""
        known = len(self._intervals)
        return num_waiting * sum(self._intervals) / known if known >= WINDOW // 4 else 0.0


@dataclass(eq=False)
class Ticket:
    """The slot of a job in a queue."""

    line: QueueDelayLimiter
    waits: bool = True

    def release(self, *, begun: bool = False) -> None:
        """Exit the queue, with the first token if `begun`. Repeated calls do nothing."""
        if self.waits:
            self.waits = False
            self.line.exit(begun=begun)


@dataclass
class RequestTickets:
    """Tickets of a request: `free` for each known job at first, others for each further waiting job later."""

    line: QueueDelayLimiter
    free: list[Ticket]
    _acquired: list[Ticket] = field(default_factory=list)

    @property
    def num_waiting(self) -> int:
        """Jobs that were sent off and have no token yet."""
        return sum(ticket.waits for ticket in self._acquired)

    def acquire(self) -> Ticket:
        """Return the ticket of a job that is sent off now."""
        self._acquired = [ticket for ticket in self._acquired if ticket.waits]
        self._acquired.append(self.free.pop() if self.free else self.line.join())
        return self._acquired[-1]

    def release(self) -> None:
        """Release all tickets: the request ends."""
        for ticket in (*self.free, *self._acquired):
            ticket.release()
