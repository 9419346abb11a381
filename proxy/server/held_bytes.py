"""The bytes of request bodies and media that the proxy holds at once, of all requests together, within a budget.

The number of requests bounds nothing: a thousand of them may be a thousand times the largest body. So each takes what
it is about to hold out of one budget, before it reads, decodes or fetches it, and is refused while that is not there;
nobody waits, so nobody can wait for each other. What it has taken goes back when the request ends, however it does.
"""

from __future__ import annotations

from common.errors import TriptychError
from proxy.server.errors import Overloaded
from proxy.server.metrics import ProxyMetrics


class ByteBudget:
    """The bytes of all requests."""

    def __init__(self, limit_bytes: int, metrics: ProxyMetrics) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self._metrics = metrics

    def open(self) -> Reservation:
        """The share of one request, empty at first. Release it."""
        return Reservation(self)

    def take(self, num_bytes: int, by_one: int) -> None:
        """Raises as `Reservation.grow` does; `by_one` are the bytes that one request would hold then."""
        if by_one > self.limit_bytes:
            message = f"the request with its media takes {by_one} bytes or more in memory, the server has room for"
            raise TriptychError("item_too_large", f"{message} {self.limit_bytes} in all (max_inflight_bytes)")
        if self.held_bytes + num_bytes > self.limit_bytes:
            self._metrics.refused.labels("bytes").inc()
            message = f"{self.held_bytes} bytes of requests are under way, {num_bytes} more would be over the limit of"
            raise Overloaded(f"{message} {self.limit_bytes} (max_inflight_bytes); try again shortly")
        self._set(self.held_bytes + num_bytes)

    def give_back(self, num_bytes: int) -> None:
        self._set(self.held_bytes - num_bytes)

    def _set(self, held_bytes: int) -> None:
        self.held_bytes = held_bytes
        self._metrics.held_bytes.set(held_bytes)


class Reservation:
    """What one request holds of the budget."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self.num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """Call before so many bytes more are held.

        Raises Overloaded where others hold too much, TriptychError("item_too_large") for what could never be held.
        """
        self._budget.take(num_bytes, self.num_bytes + num_bytes)
        self.num_bytes += num_bytes

    def shrink(self, num_bytes: int) -> None:
        """So many of them are gone."""
        self._budget.give_back(num_bytes)
        self.num_bytes -= num_bytes

    def release(self) -> None:
        """The request has ended."""
        self.shrink(self.num_bytes)
