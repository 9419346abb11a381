"""Preprocessing of media in child processes, off the loop, within a budget of memory.

Children import this module before numerics load: it must import little.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from common.messages import MediaKind
from common.process.child_pool import ChildPool

if TYPE_CHECKING:
    from engine.processors import ProcessedInput

MEMORY_BYTES: Final = 2 * 2**30
"""Limit of one item. The largest accepted image, decoded, rotated and resized, takes half."""


class MemoryGate:
    """Admits items while the admitted items hold less than `limit_bytes`; a single item is admitted at any size.

    The size of an item is known only after admission: `max_unweighed` items at most may exceed the limit.
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
                self.weigh(0)
            raise

    def weigh(self, num_bytes: int) -> None:
        """Note the size of an admitted item; 0 for one that has come to nothing."""
        self._num_unweighed -= 1
        self.held_bytes += num_bytes
        self._admit()

    def release(self, num_bytes: int) -> None:
        """Free the memory of an admitted item: the bytes passed to `weigh`."""
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


class PreprocessPool(ChildPool):
    """Child processes with a model's processor loaded. Items wait for memory with their media only: see `gate`."""

    def __init__(self, model: str, dtype: str, num_workers: int, timeout_s: float, staging_bytes: int) -> None:
        """Limit each item to `timeout_s` from its start and to MEMORY_BYTES, all arrays to `staging_bytes`."""
        self.gate = MemoryGate(staging_bytes, num_workers)
        super().__init__(
            partial(initialize, model, dtype),
            work="preprocessing",
            num_workers=num_workers,
            timeout_s=timeout_s,
            memory_bytes=MEMORY_BYTES,
        )

    async def process(self, kind: MediaKind, media: bytes) -> ProcessedInput:
        """Preprocess one item, once admitted to memory; call `release` after its use. Raises as `process` and `run`."""
        from engine.processors import process

        await self.gate.acquire()
        try:
            item = await self.run(f"this {kind} of {len(media)} bytes", process, kind, media)
        except BaseException:
            self.gate.weigh(0)
            raise
        self.gate.weigh(item.array_bytes)
        return item

    def release(self, item: ProcessedInput) -> ProcessedInput:
        """Free the memory of an item's arrays. Return the item without arrays, whose release frees nothing."""
        self.gate.release(item.array_bytes)
        return replace(item, arrays={})


def initialize(model: str, dtype: str) -> None:
    """Prepare a child: one CPU thread, processor loaded."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from engine.processors import init_worker

    init_worker(model, dtype)
