"""Owners of requests: the proxy of each request, and silent proxies."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from broker.cluster.rpc import supersedes
from common.telemetry import get_logger

SILENCE_S: Final = 10.0
"""Silence after which a proxy counts as lost, with its requests; a proxy sends a heartbeat every second."""
_GONE: Final = float("-inf")
_MAX_LOST: Final = 64
_MAX_ENDED: Final = 1024

log = get_logger()


@dataclass
class OwnedRequest:
    """A request under way. `proxy` is the routing id for answers, `num_tokens` bounds prompt and output together."""

    proxy: bytes
    num_tokens: int
    work: int
    """Tokens at most; of an encoder's, items."""
    attempt: int
    arrived_s: float
    """By `time.monotonic`."""
    has_begun: bool = False
    """Whether the first tokens have been sent."""


class RequestOwners:
    """Request ids of each proxy (by ZMQ routing id), until a request ends or the proxy is lost."""

    def __init__(self, silence_s: float = SILENCE_S) -> None:
        self._silence_s = silence_s
        self._last_heard_s: dict[bytes, float] = {}
        self._requests: dict[str, OwnedRequest] = {}
        self.num_orphans = 0
        """Requests discarded because of a lost or silent proxy."""
        self.num_unknown = 0
        """Inquiries of proxies about unknown requests."""
        self.ended_work = 0
        """Tokens at most of all requests that have ended; of an encoder's, items."""
        self._lost: dict[bytes, dict[str, int]] = {}  # discarded requests, in case the proxy comes back
        self._ended: dict[str, int] = {}  # attempts of the last requests that ended with the proxy's knowledge
        self.first_request_s: float | None = None
        """Arrival of the first request (monotonic)."""

    def heard(self, proxy: bytes) -> dict[str, int]:
        """Note a sign of life. Return requests discarded since the last sign, with attempts, to notify the proxy.

        A proxy marked as gone is heard again once `pop_orphans` has returned its requests.
        """
        if self._last_heard_s.get(proxy) == _GONE:
            return {}
        self._last_heard_s[proxy] = time.monotonic()
        return self._lost.pop(proxy, {})

    def add(
        self, proxy: bytes, request_id: str, num_tokens: int = 0, attempt: int = 0, *, num_new_items: int = 0
    ) -> None:
        """Add a request of a proxy, or an attempt or items of a known one. `num_tokens` bounds prompt and output."""
        now_s = time.monotonic()
        if self.first_request_s is None:
            self.first_request_s = now_s
        log.debug("request received", request=request_id, attempt=attempt, tokens=num_tokens)
        known = self._requests.get(request_id)
        work = num_tokens or max(1, num_new_items + (0 if known is None else known.work))
        self._requests[request_id] = OwnedRequest(proxy, num_tokens, work, attempt, now_s)

    @property
    def num_tokens(self) -> int:
        """Upper bound of the tokens of all requests under way."""
        return sum(request.num_tokens for request in self._requests.values())

    @property
    def work(self) -> int:
        """Upper bound of the tokens of all requests under way; of an encoder's, their items."""
        return sum(request.work for request in self._requests.values())

    def get(self, request_id: str) -> OwnedRequest | None:
        """Return a request under way; None for an ended or unknown request."""
        return self._requests.get(request_id)

    def owns(self, proxy: bytes, request_id: str) -> bool:
        """Whether a request came from this proxy, on this connection or on a superseded connection."""
        request = self._requests.get(request_id)
        return request is not None and (request.proxy == proxy or supersedes(proxy, request.proxy))

    def remove(self, request_id: str) -> None:
        """Remove a request after the message of its end; lost to a proxy marked as gone, as the message is."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self.ended_work += request.work
        if self._last_heard_s.get(request.proxy) == _GONE:
            log.warning("request dropped: its proxy is gone or silent", request=request_id)
            self.num_orphans += 1
            self.lose(request.proxy, {request_id: request.attempt})
            return
        log.debug("request ended", request=request_id, attempt=request.attempt)
        self._ended.pop(request_id, None)
        self._ended[request_id] = request.attempt
        while len(self._ended) > _MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    def lose(self, proxy: bytes, requests: dict[str, int]) -> None:
        """Note discarded requests, with attempts, until the proxy's next sign of life."""
        self._lost.setdefault(proxy, {}).update(requests)

    def knows(self, request_id: str, attempt: int) -> bool:
        """Whether this attempt is under way, or was removed lately."""
        request = self._requests.get(request_id)
        return attempt == self._ended.get(request_id) or (request is not None and request.attempt == attempt)

    def mark_gone(self, proxy: bytes) -> None:
        """Note a broken connection: the next `pop_orphans` returns the proxy's requests."""
        self._last_heard_s[proxy] = _GONE

    @property
    def present(self) -> list[bytes]:
        """Proxies not known to be lost."""
        return list(self._last_heard_s)

    def pop_orphans(self) -> list[str]:
        """Remove lost proxies, and proxies silent for too long; return the requests of both."""
        limit_s = time.monotonic() - self._silence_s
        gone = {proxy for proxy, heard_s in self._last_heard_s.items() if heard_s < limit_s}
        orphans = [request_id for request_id, request in self._requests.items() if request.proxy in gone]
        for proxy in gone:
            self.mark_gone(proxy)
        for request_id in orphans:
            self.remove(request_id)
        for proxy in gone:
            del self._last_heard_s[proxy]
        while len(self._lost) > _MAX_LOST:
            del self._lost[next(iter(self._lost))]
        return orphans

    def __len__(self) -> int:
        """Number of requests under way."""
        return len(self._requests)
