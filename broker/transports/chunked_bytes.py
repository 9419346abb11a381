"""Bytes that arrive in pieces, and stay at the pieces' addresses."""

from __future__ import annotations

from collections.abc import Iterator

from common.hashing import Checksum


class ChunkedBytes:
    """Bytes in host memory, in several places. Iterates over the pieces, in order.

    Adding a piece hashes the piece, still in the processor's cache.
    """

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
        return self._digest.value

    def joined(self) -> memoryview:
        """Return a contiguous copy."""
        return memoryview(b"".join(self._pieces))

    def release(self) -> None:
        """Let go of the memory, as memoryview does. Raises BufferError where an array looks at a piece."""
        for piece in self._pieces:
            piece.release()
