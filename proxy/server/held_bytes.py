"""Memory budget for request bodies and media, shared by all requests of the proxy.

A limit on the number of requests bounds no memory: a thousand requests may be a thousand times the largest body. Each
request therefore reserves bytes before it reads, decodes or fetches them. A reservation that does not fit is refused at
once: waiting requests could wait for each other. All bytes are released when the request ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import TriptychError
from proxy.server.errors import Overloaded
from proxy.server.metrics import ProxyMetrics


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
