"""Memory for preprocessed media, granted first come first served."""

from __future__ import annotations

import asyncio
from collections import deque


class MemoryGate:
    """Admits items while the admitted items hold less than `limit_bytes`; a single item is admitted at any size.

    The size of an item is known only after admission. At most `max_unweighed` items of unknown size are admitted: the
    limit can be exceeded by so many.
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

    async def acquire(self) -> None:
        """Wait for admission. A cancelled wait holds no memory."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.remove(turn)
            else:  # admitted just before
                self.release(None)
            raise

    def weigh(self, num_bytes: int) -> None:
        """Tell the size of an admitted item."""
        self._num_unweighed -= 1
        self.held_bytes += num_bytes
        self._admit()

    def release(self, num_bytes: int | None) -> None:
        """Free the memory of an admitted item: the bytes passed to `weigh`, or None for an unweighed item."""
        if num_bytes is None:
            self._num_unweighed -= 1
        else:
            self.held_bytes -= num_bytes
        self._admit()

    def _admit(self) -> None:
        for turn in list(self._waiting):
            if self._num_unweighed >= self._max_unweighed or self.held_bytes >= self._limit_bytes:
                return
            if not turn.cancelled():  # else its task is about to remove it
                self._waiting.remove(turn)
                self._num_unweighed += 1
                turn.set_result(None)
