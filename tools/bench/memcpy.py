"""One copy of bytes within a process, which the ways of tensors are compared with: in two kinds, for one does not stand
for the other.

A copy of the same bytes to the same place, again and again, stays in the processor's caches as far as they go. A tensor
comes from where a model has just written it and goes where nothing has been lately: that is a copy over cold memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
IN_CACHE: Final = "memcpy in cache"
COLD: Final = "memcpy, cold"
KINDS: Final = (IN_CACHE, COLD)


class Memcpy:
    """Copies out of `source` into memory of its own as large, which has to be more than the last-level cache holds."""

    def __init__(self, source: Bytes) -> None:
        self._source = source
        self._target = np.zeros_like(source)
        self._next = 0

    def times_s(self, kind: str, size_bytes: int, count: int) -> list[float]:
        """How long each of `count` copies took, in seconds; the first one in cache has brought it there."""
        starts = iter([0] * (count + 1)) if kind == IN_CACHE else self._starts(size_bytes, count + 1)
        return [self._copy_s(start, size_bytes) for start in starts][1:]

    def _starts(self, size_bytes: int, count: int) -> Iterator[int]:
        """On from where the last ones ended, so that all of the memory has its turn before any has it again."""
        for _ in range(count):
            if self._next + size_bytes > self._source.size:
                self._next = 0
            yield self._next
            self._next += size_bytes

    def _copy_s(self, start: int, size_bytes: int) -> float:
        source, target = (array[start : start + size_bytes] for array in (self._source, self._target))
        began_s = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - began_s
