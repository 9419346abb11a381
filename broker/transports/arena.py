"""Slices of a piece of memory, reserved and released in any order.

    0                                                        size
    | slice |  hole  | slice | slice |           hole          |

Always the first hole that fits: memory used lately is in the processor's cache, and other pages stay untouched.
"""

from __future__ import annotations

import asyncio
from typing import Final

ALIGNMENT_BYTES: Final = 64
"""Every slice begins at a multiple: a cache line, and enough for any dtype."""


def aligned(num_bytes: int) -> int:
    """Return the next multiple of ALIGNMENT_BYTES."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Arena:
    """Bookkeeping of `size_bytes` bytes, without the memory."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._holes: list[tuple[int, int]] = [(0, size_bytes)]  # [start, end), sorted, never touching each other
        self._slices: dict[int, int] = {}  # start: end

    @property
    def num_reserved(self) -> int:
        return len(self._slices)

    def reserve(self, num_bytes: int) -> int | None:
        """Return the offset of a slice for `num_bytes`; None if no hole is large enough at the moment."""
        needed = aligned(max(1, num_bytes))
        for index, (start, end) in enumerate(self._holes):
            if end - start >= needed:
                self._holes[index : index + 1] = [(start + needed, end)] if end - start > needed else []
                self._slices[start] = start + needed
                return start
        return None

    def release(self, offset: int) -> None:
        """Release the slice at `offset`. Raises KeyError for any other offset."""
        start, end = offset, self._slices.pop(offset)
        index = next((i for i, hole in enumerate(self._holes) if hole[0] > start), len(self._holes))
        if index < len(self._holes) and self._holes[index][0] == end:
            end = self._holes.pop(index)[1]
        if index > 0 and self._holes[index - 1][1] == start:
            index -= 1
            start = self._holes.pop(index)[0]
        self._holes.insert(index, (start, end))


class Notifier:
    """Wakes all callers that wait for a change, such as a release. For one loop."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    async def wait(self) -> None:
        """Wait for the next `notify`."""
        await self._changed.wait()

    def notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
