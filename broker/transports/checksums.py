"""Passes over the bytes of a tensor: the checksum, or a copy with the checksum made on the fly.

A copied piece stays in the processor's cache until the checksum has read the piece, at hardly more cost than the copy.
Everything happens on the loop, with turns for other tasks in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

import msgspec

from common.hashing import Checksum, checksum
from common.messages import TensorHeader

PIECE_BYTES: Final = 2**20
"""Copied, and then hashed, still in a cache. Smaller pieces took half as long again, with pages of 4 KiB."""
TURN_BYTES: Final = 8 * 2**20
"""Bytes between two turns of others on the loop: about a millisecond."""


async def checksum_of(data: memoryview) -> int:
    """Return the checksum of `data`, without a copy."""
    if data.nbytes <= TURN_BYTES:
        return checksum(data)
    digest = Checksum()
    for start in range(0, data.nbytes, TURN_BYTES):
        digest.update(data[start : start + TURN_BYTES])
        await asyncio.sleep(0)
    return digest.intdigest()


async def with_checksum(header: TensorHeader, data: memoryview) -> TensorHeader:
    """Return `header` with the checksum of `data`."""
    return msgspec.structs.replace(header, checksum=await checksum_of(data))


async def copy(source: memoryview, target: memoryview, hashed: memoryview) -> int:
    """Copy all of `source` to `target`, of equal size. Return the checksum of `hashed`, one of the two."""
    if source.nbytes <= TURN_BYTES:
        return copy_now(source, target, hashed)
    digest = Checksum()
    for start in range(0, source.nbytes, TURN_BYTES):
        if start:
            await asyncio.sleep(0)
        end = start + TURN_BYTES
        _copy_turn(source[start:end], target[start:end], hashed[start:end], digest)
    return digest.intdigest()


def copy_now(source: memoryview, target: memoryview, hashed: memoryview) -> int:
    """The same without a turn for others in between: for TURN_BYTES at most."""
    if source.nbytes <= PIECE_BYTES:
        target[:] = source
        return checksum(hashed)
    digest = Checksum()
    _copy_turn(source, target, hashed, digest)
    return digest.intdigest()


def _copy_turn(source: memoryview, target: memoryview, hashed: memoryview, digest: Checksum) -> None:
    for start in range(0, source.nbytes, PIECE_BYTES):
        end = start + PIECE_BYTES
        target[start:end] = source[start:end]
        digest.update(hashed[start:end])


async def join(pieces: Iterable[memoryview], target: memoryview) -> None:
    """Copy pieces of at most TURN_BYTES to `target`, in order."""
    start = 0
    for piece in pieces:
        if start and start % TURN_BYTES == 0:
            await asyncio.sleep(0)
        target[start : start + piece.nbytes] = piece
        start += piece.nbytes
