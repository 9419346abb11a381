"""Room in a piece of memory, lent and given back in any order.

    0                                                        size
    | lent |  hole  | lent | lent |           hole             |

Always the first hole that fits: the processor's cache still has memory used lately, and unneeded pages stay untouched.
"""

from __future__ import annotations

from typing import Final

ALIGNMENT_BYTES: Final = 64
"""Every slice begins at a multiple: a cache line, and enough for any dtype."""


def aligned(num_bytes: int) -> int:
    """The next multiple of ALIGNMENT_BYTES."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Arena:
    """Bookkeeping of `size_bytes` bytes, without the memory."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._holes: list[tuple[int, int]] = [(0, size_bytes)]  # [start, end), sorted, never touching each other
        self._lent: dict[int, int] = {}  # start: end

    @property
    def num_reserved(self) -> int:
        return len(self._lent)

    def reserve(self, num_bytes: int) -> int | None:
        """The offset of room for `num_bytes`; None where no hole is large enough at the moment."""
        needed = aligned(max(1, num_bytes))
        for index, (start, end) in enumerate(self._holes):
            if end - start >= needed:
                self._holes[index : index + 1] = [(start + needed, end)] if end - start > needed else []
                self._lent[start] = start + needed
                return start
        return None

    def release(self, offset: int) -> None:
        """The room at `offset` is free again. Raises KeyError where none was lent."""
        start, end = offset, self._lent.pop(offset)
        index = next((i for i, hole in enumerate(self._holes) if hole[0] > start), len(self._holes))
        if index < len(self._holes) and self._holes[index][0] == end:
            end = self._holes.pop(index)[1]
        if index > 0 and self._holes[index - 1][1] == start:
            index -= 1
            start = self._holes.pop(index)[0]
        self._holes.insert(index, (start, end))
