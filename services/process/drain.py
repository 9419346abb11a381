"""How a worker leaves on purpose: it takes nothing new, finishes what it has, and goes, for good or to another role."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from common.errors import TriptychError
from common.messages import Role

ANNOUNCE_S: Final = 30.0
"""A broker that is away for longer is not waited for: proxies see by the closed connection that the worker has gone."""
NOTICE_S: Final = 1.5
"""Proxies are told, or look at the registry twice a second: after so long they all know, and what they had sent is
here."""
_POLL_S: Final = 0.05


class DrainState:
    """Nobody's, until `request`. `next_role` is what the process is to become then; None if it is to end."""

    def __init__(self, num_open: Callable[[], int], patience_s: float) -> None:
        """`num_open` counts the requests under way, each of which ends within `patience_s`."""
        self._num_open = num_open
        self._patience_s = patience_s
        self._requested_s = float("inf")
        self._announced_s: float | None = None
        self.requested = False
        self.next_role: Role | None = None

    def request(self, next_role: Role | None = None) -> None:
        """Leave as soon as everything under way is done. Raises TriptychError where another end has been asked for."""
        if self.requested and next_role != self.next_role:
            planned = "end" if self.next_role is None else f"change its role to {self.next_role}"
            raise TriptychError("invalid_request", f"this worker is draining already, to {planned}", "role")
        if not self.requested:
            self._requested_s = time.monotonic()
        self.requested, self.next_role = True, next_role

    def announced(self) -> None:
        """The registry says by now that this worker is draining."""
        if self._announced_s is None:
            self._announced_s = time.monotonic()

    async def complete(self) -> None:
        """Return once the worker may go: it has been told to, every proxy knows, and nothing has been under way since.

        Without a broker to tell it to the proxies, only ANNOUNCE_S are waited for it. What came before has ended after
        `patience_s`; where new requests come all the same, they are left to others then, as those of a lost worker.
        """
        quiet_since_s = float("inf")
        while time.monotonic() - quiet_since_s < NOTICE_S:
            await asyncio.sleep(_POLL_S)
            waited_s = time.monotonic() - self._requested_s
            if waited_s > self._patience_s:
                return
            told = self._announced_s is not None or waited_s > ANNOUNCE_S
            if not told or self._num_open():
                quiet_since_s = float("inf")
            elif quiet_since_s == float("inf"):
                quiet_since_s = time.monotonic()
