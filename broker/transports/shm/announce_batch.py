"""Small tensors announced together by the sender of shared memory.

    one turn of the loop sends a, b, c, ...
        a            announced at once
        b, c, ...    copied into one room, one behind the other; announced when it is full, or when the turn ends

Announcing, hearing of and releasing a tensor takes either process as long as copying 200 KiB. So consecutive tensors
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
from broker.transports.shm.wire import MAX_BUNDLED, Bundle, pack
from common.messages import TensorHeader

MAX_BYTES: Final = 256 * 2**10
"""A larger tensor is announced by itself."""
ROOM_BYTES: Final = 2**20
"""Of one bundle. With less, its share of what is done once is larger; with more, its room is no longer in a processor's
cache when it comes back."""


class AnnounceBatch:
    """The small tensors sent together over one connection. For the loop's thread."""

    def __init__(self, packets: PacketSocket, lend: Callable[[int], ArenaSlice | None]) -> None:
        """Reserve memory by `lend`, which returns None if memory is short now."""
        self._packets = packets
        self._lend = lend
        self._loop = asyncio.get_running_loop()
        self._bundle: _Bundle | None = None
        self._has_sent = False  # in this turn of the loop
        self._announcing: asyncio.Task[None] | None = None

    def add(self, header: TensorHeader, data: memoryview) -> bool:
        """Copy a tensor of at most MAX_BYTES, to be announced together with others of this turn.

        False if the tensor should go alone: as the first of the turn, or for lack of memory, or while the receiver has
        still to hear of others.
        """
        if not self._has_sent:
            self._has_sent = True
            self._loop.call_soon(self._end_turn)
            return False
        if self._announcing is not None:
            return False
        if self._bundle is None or not self._bundle.has_room(data.nbytes):
            self.announce()
            room = self._lend(ROOM_BYTES)
            if room is None:
                return False
            self._bundle = _Bundle(room)
        if self._bundle.add(header, data) == MAX_BUNDLED:
            self.announce()
        return True

    def announce(self) -> bool:
        """Announce the added tensors, ahead of any later announcement. Return False while the announcement waits."""
        bundle, self._bundle = self._bundle, None
        if bundle is not None:
            packet = bundle.packed()
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


class _Bundle:
    """Tensors one behind the other in one arena slice."""

    def __init__(self, room: ArenaSlice) -> None:
        self._slot = room.slot
        self._offset = room.offset
        self._memory = room.memory.data
        self._end = 0
        self._headers: list[TensorHeader] = []

    def has_room(self, num_bytes: int) -> bool:
        return self._end + num_bytes <= ROOM_BYTES

    def add(self, header: TensorHeader, data: memoryview) -> int:
        """Copy a tensor behind the others; return the new count."""
        start, end = self._end, self._end + data.nbytes
        checksum = checksums.copy_now(data, self._memory[start:end], hashed=data)
        self._headers.append(msgspec.structs.replace(header, checksum=checksum))
        self._end = aligned(end)
        return len(self._headers)

    def packed(self) -> bytes:
        """Return the packet that announces the tensors."""
        return pack(Bundle(self._slot, self._offset, self._headers))
