"""Small tensors announced together by the sender of shared memory.

    one turn of the loop sends a, b, c, ...
        a            announced at once
        b, c, ...    copied into one slice, one behind the other; announced when it is full, or when the turn ends

Announcing, receiving and releasing a tensor takes either process as long as copying 200 KiB. So consecutive tensors
share that cost; a single tensor waits for no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import msgspec

from broker.transports import checksums
from broker.transports.arena import aligned
from broker.transports.linked.packets import PacketSocket
from broker.transports.shm.segment import ArenaSlice
from broker.transports.shm.wire import MAX_BATCH, AnnounceBatch
from common.messages import TensorHeader, encode

MAX_BYTES: Final = 256 * 2**10
"""A larger tensor is announced by itself."""
SLICE_BYTES: Final = 2**20
"""Of one batch; a larger slice is no longer in a processor's cache after its release."""


class AnnounceBatcher:
    """The small tensors sent together over one connection. For the loop's thread."""

    def __init__(self, packets: PacketSocket, reserve: Callable[[int], ArenaSlice | None]) -> None:
        """Reserve memory by `reserve`, which returns None if memory is short now."""
        self._packets = packets
        self._reserve = reserve
        self._loop = asyncio.get_running_loop()
        self._slice: ArenaSlice | None = None
        self._headers: list[TensorHeader] = []  # of the tensors in the slice
        self._end = 0
        self._has_sent = False  # in this turn of the loop
        self._announcing: asyncio.Task[None] | None = None

    def add(self, header: TensorHeader, data: memoryview) -> bool:
        """Copy a tensor of at most MAX_BYTES, to be announced together with others of this turn.

        False if the tensor should go alone: first of the turn, without memory, or behind a waiting announcement.
        """
        if not self._has_sent:
            self._has_sent = True
            self._loop.call_soon(self._end_turn)
            return False
        if self._announcing is not None:
            return False
        if self._slice is None or self._end + data.nbytes > SLICE_BYTES:
            self.announce()
            self._slice, self._end = self._reserve(SLICE_BYTES), 0
            if self._slice is None:
                return False
        end = self._end + data.nbytes
        checksum = checksums.copy_now(data, self._slice.memory.data[self._end : end], hashed=data)
        self._headers.append(msgspec.structs.replace(header, checksum=checksum))
        self._end = aligned(end)
        if len(self._headers) == MAX_BATCH:
            self.announce()
        return True

    def announce(self) -> bool:
        """Announce the added tensors, ahead of any later announcement. Return False while the announcement waits."""
        part, headers = self._slice, self._headers
        self._slice, self._headers = None, []
        if part is not None:
            packet = encode(AnnounceBatch(part.slot, part.offset, headers))
            with suppress(OSError):  # the receiver has gone: no receipts will come
                if not self._packets.try_send(packet):
                    self._announcing = self._loop.create_task(self._announce_later(packet))
        return self._announcing is None

    async def announced(self) -> None:
        """Announce the added tensors, and wait until the receiver's socket has the packet."""
        while not self.announce():
            await asyncio.wait([self._announcing] if self._announcing is not None else [])

    def _end_turn(self) -> None:
        self._has_sent = False
        self.announce()

    async def _announce_later(self, packet: bytes) -> None:
        """The receiver is slow to read."""
        with suppress(OSError):
            await self._packets.send(packet)
        self._announcing = None
