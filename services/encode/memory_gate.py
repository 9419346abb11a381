"""Memory for preprocessed media, handed out first come first served."""

from __future__ import annotations

import asyncio
from collections import deque


class MemoryTicket:
    """What one item takes. Unknown until `weigh`; given back by `leave`, which may be called more than once."""

    def __init__(self, room: MemoryGate) -> None:
        self._room = room
        self._num_bytes: int | None = None
        self._left = False

    def weigh(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._room._change(-1, num_bytes)

    def leave(self) -> None:
        if self._left:
            return
        self._left = True
        if self._num_bytes is None:
            self._room._change(-1, 0)
        else:
            self._room._change(0, -self._num_bytes)


class MemoryGate:
    """Lets items in while those inside hold less than `limit_bytes`; one alone comes in however big it is.

    How big an item is shows only when it is in, so at most `max_unweighed` may be in without that being known: by so
    many the limit can be exceeded.
    """

    def __init__(self, limit_bytes: int, max_unweighed: int) -> None:
        self._limit_bytes = limit_bytes
        self._max_unweighed = max_unweighed
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._num_unweighed = 0
        self.held_bytes = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def enter(self) -> MemoryTicket:
        """Wait for one's turn. A cancelled wait leaves nothing behind."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.remove(turn)
            else:  # its turn had just come
                self._change(-1, 0)
            raise
        return MemoryTicket(self)

    def _change(self, num_unweighed: int, num_bytes: int) -> None:
        self._num_unweighed += num_unweighed
        self.held_bytes += num_bytes
        self._admit()

    def _admit(self) -> None:
        for turn in list(self._waiting):
            if self._num_unweighed >= self._max_unweighed or self.held_bytes >= self._limit_bytes:
                return
            if not turn.cancelled():  # else its task is about to remove it
                self._waiting.remove(turn)
                self._num_unweighed += 1
                turn.set_result(None)
