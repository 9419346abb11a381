"""Drain of a worker: refuse new requests, finish requests under way, then end or change the role."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from common.errors import TriptychError
from common.messages import Role

ANNOUNCE_S: Final = 30.0
"""Longest wait for a broker that is away: proxies see the worker go by its closed connection."""
NOTICE_S: Final = 1.5
"""After the announcement, time for all proxies to learn of the drain (they read the registry twice a second), and for
requests sent before to arrive."""
_POLL_S: Final = 0.05


class DrainState:
    """Begins with `request`. `next_role` is the role after the drain; None ends the process."""

    def __init__(self, num_open: Callable[[], int], patience_s: float) -> None:
        """`num_open` counts requests under way; each ends within `patience_s`."""
        self._num_open = num_open
        self._patience_s = patience_s
        self._requested_s = float("inf")
        self._announced_s: float | None = None
        self.requested = False
        self.next_role: Role | None = None

    def request(self, next_role: Role | None = None) -> None:
        """Leave once all requests are done. Raises TriptychError after a request for another end."""
        if self.requested and next_role != self.next_role:
            planned = "end" if self.next_role is None else f"change its role to {self.next_role}"
            raise TriptychError("invalid_request", f"this worker is draining already, to {planned}", "role")
        if not self.requested:
            self._requested_s = time.monotonic()
        self.requested, self.next_role = True, next_role

    def announced(self) -> None:
        """Note that the registry shows the drain."""
        if self._announced_s is None:
            self._announced_s = time.monotonic()

    async def complete(self) -> None:
        """Return once the worker may go: requested, known to every proxy, and no request under way since.

        Without a broker the announcement is given up after ANNOUNCE_S. All ends after `patience_s`: earlier requests
        are done by then, and later requests are left to other workers like the requests of a lost worker.
        """
        quiet_since_s = float("inf")
        while time.monotonic() - quiet_since_s < NOTICE_S:
            await asyncio.sleep(_POLL_S)
            waited_s = time.monotonic() - self._requested_s
            if waited_s > self._patience_s:
                return
            is_known = self._announced_s is not None or waited_s > ANNOUNCE_S
            if not is_known or self._num_open():
                quiet_since_s = float("inf")
            elif quiet_since_s == float("inf"):
                quiet_since_s = time.monotonic()
