"""Which proxy sent which request, and which proxies have fallen silent."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from broker.cluster.rpc import supersedes

SILENCE_S: Final = 10.0
"""A proxy unheard of for so long is gone, and its requests with it; it sends a heartbeat every second."""
_MAX_LOST: Final = 64
_MAX_ENDED: Final = 1024


@dataclass(frozen=True)
class _Request:
    proxy: bytes
    num_tokens: int
    attempt: int


class RequestOwners:
    """The request ids of each proxy (known by its ZMQ routing id), until they end or the proxy is gone."""

    def __init__(self, silence_s: float = SILENCE_S) -> None:
        self._silence_s = silence_s
        self._last_heard_s: dict[bytes, float] = {}
        self._requests: dict[str, _Request] = {}
        self.num_orphans = 0
        """Requests dropped because their proxy was gone or silent."""
        self.num_unknown = 0
        """Requests that a proxy has asked for in vain."""
        self._lost: dict[bytes, dict[str, int]] = {}  # what was dropped, in case its proxy comes back
        self._ended: dict[str, int] = {}  # the last requests whose proxy knows of their end, with their attempts
        self.first_request_s: float | None = None
        """When the first one came (monotonic)."""

    def heard(self, proxy: bytes) -> dict[str, int]:
        """A sign of life. Returns the requests that were dropped since the last one, with their attempts: their proxy
        has to be told."""
        self._last_heard_s[proxy] = time.monotonic()
        return self._lost.pop(proxy, {})

    def add(self, proxy: bytes, request_id: str, num_tokens: int = 0, attempt: int = 0) -> None:
        """A request of this proxy is under way, of so many tokens at most, prompt and output together."""
        if self.first_request_s is None:
            self.first_request_s = time.monotonic()
        self._requests[request_id] = _Request(proxy, num_tokens, attempt)

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests under way, at most."""
        return sum(request.num_tokens for request in self._requests.values())

    def owner(self, request_id: str) -> bytes | None:
        """The routing id of the proxy that answers go to; None for an ended or unknown request."""
        request = self._requests.get(request_id)
        return None if request is None else request.proxy

    def attempt(self, request_id: str) -> int | None:
        """The attempt that is under way; None for an ended or unknown request."""
        request = self._requests.get(request_id)
        return None if request is None else request.attempt

    def owns(self, proxy: bytes, request_id: str) -> bool:
        """Whether a request came from this proxy, on this connection or on one that it has given up for it."""
        owner = self.owner(request_id)
        return owner is not None and (owner == proxy or supersedes(proxy, owner))

    def remove(self, request_id: str) -> None:
        """Its proxy has been told of its end, or has ended it."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._ended.pop(request_id, None)
            self._ended[request_id] = request.attempt
            while len(self._ended) > _MAX_ENDED:
                del self._ended[next(iter(self._ended))]

    def knows(self, request_id: str, attempt: int) -> bool:
        """Whether this attempt is under way here, or has ended lately as `remove` says."""
        return attempt in (self.attempt(request_id), self._ended.get(request_id))

    def mark_gone(self, proxy: bytes) -> None:
        """Its connection does not take messages: the next `take_orphans` returns its requests."""
        self._last_heard_s[proxy] = float("-inf")

    @property
    def present(self) -> list[bytes]:
        """Proxies that are not known to be gone."""
        return list(self._last_heard_s)

    def take_orphans(self) -> list[str]:
        """Forget the proxies that are gone or have been silent for too long; returns the requests they leave."""
        limit_s = time.monotonic() - self._silence_s
        gone = {proxy for proxy, heard_s in self._last_heard_s.items() if heard_s < limit_s}
        orphans = [request_id for request_id, request in self._requests.items() if request.proxy in gone]
        self.num_orphans += len(orphans)
        for request_id in orphans:
            request = self._requests.pop(request_id)
            self._lost.setdefault(request.proxy, {})[request_id] = request.attempt
        for proxy in gone:
            del self._last_heard_s[proxy]
        while len(self._lost) > _MAX_LOST:
            del self._lost[next(iter(self._lost))]
        return orphans

    def __len__(self) -> int:
        """Number of requests under way."""
        return len(self._requests)
