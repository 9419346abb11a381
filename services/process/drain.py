"""Drain of a worker: refuse new requests, finish requests under way, then end or change the role.

A file tells the worker's supervisor of the drain.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, cast

from common.errors import TriptychError
from common.messages import Role
from common.telemetry import get_logger

ANNOUNCE_S: Final = 30.0
"""Longest wait for an absent broker: proxies notice the end of the worker by the closed connection."""
NOTICE_S: Final = 1.5
"""Time after the announcement: all proxies read the registry twice a second, and earlier requests arrive."""
ANSWER_S: Final = 0.2
"""Time before the end of the process: who waits for the drain gets the answer."""
_POLL_S: Final = 0.05
VARIABLE: Final = "TRIPTYCH_DEPARTURE_NOTE"
"""Environment variable with the path of a DrainMarker."""

log = get_logger()


@dataclass(eq=False)
class DrainState:
    """Begins with `request`. `next_role` is the role after the drain; None ends the process.

    `num_open` counts requests under way; each ends within `patience_s`.
    """

    num_open: Callable[[], int]
    patience_s: float
    requested: bool = False
    announced: bool = False
    """Whether the registry shows the drain."""
    next_role: Role | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the worker may go."""
    _requested_s: float = float("inf")

    def request(self, next_role: Role | None = None) -> None:
        """Begin the drain. Raises TriptychError after a request for another end."""
        if self.requested and next_role != self.next_role:
            planned = "end" if self.next_role is None else f"change its role to {self.next_role}"
            raise TriptychError("invalid_request", f"this worker is draining already, to {planned}", "role")
        if not self.requested:
            self._requested_s = time.monotonic()
        self.requested, self.next_role = True, next_role

    async def complete(self) -> None:
        """Return ANSWER_S after the worker may go, as `wait` tells."""
        await self._until_quiet()
        self.over.set()
        await asyncio.sleep(ANSWER_S)

    async def wait(self, wait_s: float) -> int:
        """Return the number of requests under way once the worker may go, or after `wait_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self.over.wait()
        return self.num_open()

    async def _until_quiet(self) -> None:
        """Return once the worker may go: requested, known to every proxy, and no request under way since.

        Without a broker the wait for the announcement ends after ANNOUNCE_S, and all waits after `patience_s`.
        """
        quiet_since_s = float("inf")
        while time.monotonic() - quiet_since_s < NOTICE_S:
            await asyncio.sleep(_POLL_S)
            waited_s = time.monotonic() - self._requested_s
            if waited_s > self.patience_s:
                return
            is_known = self.announced or waited_s > ANNOUNCE_S
            if not is_known or self.num_open():
                quiet_since_s = float("inf")
            elif quiet_since_s == float("inf"):
                quiet_since_s = time.monotonic()


class DrainMarker:
    """A file with the next role of a worker, while the worker drains or changes the role."""

    def __init__(self, path: Path | None = None) -> None:
        """Without a path no file is written: the worker has no supervisor."""
        self._path = path

    @classmethod
    def of_environment(cls) -> DrainMarker:
        return cls(Path(path) if (path := os.environ.get(VARIABLE)) else None)

    def write(self, next_role: Role | None) -> None:
        """Write the role after the drain; None for no further process."""
        if self._path is None:
            return
        unfinished = self._path.with_suffix(".new")
        try:
            unfinished.write_text(next_role or "")
            unfinished.replace(self._path)
        except OSError as error:
            log.warning("no note can be left of this worker's departure", error=str(error))

    def remove(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    @property
    def exists(self) -> bool:
        return self._path is not None and self._path.exists()

    @property
    def next_role(self) -> Role | None:
        """The role after the drain; None for no further process, and without a file."""
        text = self._path.read_text() if self._path is not None and self._path.exists() else ""
        return cast(Role | None, text or None)
