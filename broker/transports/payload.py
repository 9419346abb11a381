"""Payloads of transports: bytes in host memory, in one piece or in several, or memory of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from common.hashing import Checksum


@dataclass(frozen=True, eq=False)
class DeviceBuffer:
    """`nbytes` of a GPU's memory at `pointer`, for copies only: this package knows no tensor library.

    The bytes are written: no stream still works on the memory. `owner` keeps the memory for the buffer's lifetime.
    """

    pointer: int
    nbytes: int
    owner: Any = field(default=None, repr=False)
    _to_host: Callable[[], memoryview] | None = field(default=None, repr=False)

    def to_host(self) -> memoryview:
        """Return the bytes in host memory. Blocks: call in a thread. Raises NotImplementedError if received."""
        if self._to_host is None:
            raise NotImplementedError("a received buffer is not sent on")
        return self._to_host()

    def release(self) -> None:
        """Do nothing, for symmetry with memoryview: this buffer counts no views."""


Payload: TypeAlias = memoryview | DeviceBuffer


class ChunkedBytes:
    """Bytes in host memory, in several places, each hashed when added. Iterates over the pieces, in order."""

    def __init__(self) -> None:
        self._pieces: list[memoryview] = []
        self._digest = Checksum()
        self.nbytes = 0

    def __iter__(self) -> Iterator[memoryview]:
        return iter(self._pieces)

    def add(self, piece: memoryview) -> None:
        """Add the next bytes, immutable from now on."""
        self._digest.update(piece)
        self._pieces.append(piece)
        self.nbytes += piece.nbytes

    @property
    def checksum(self) -> int:
        """The checksum of all bytes, as added."""
        return self._digest.intdigest()

    def joined(self) -> memoryview:
        """Return a contiguous copy."""
        return memoryview(b"".join(self._pieces))

    def release(self) -> None:
        """Let go of the memory, as memoryview does. Raises BufferError where an array looks at a piece."""
        for piece in self._pieces:
            piece.release()
