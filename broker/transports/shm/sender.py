"""Tensors through shared memory: between processes of a user on a host, without a system call per byte.

    sender                                             receiver
    +---------------- arena (memfd) ---------------+
    | tensor | free | tensor |        free         |   mapped read-only: tensors are read in place
    +----------------------------------------------+
       Unix socket: announce -->   <-- release

One copy into the arena, none out of it; or, for an early send, one copy into memory that stays the receiver's (see
push_buffer). Neither memory nor socket has a name (see packets), so the death of either side leaves nothing behind. A
handshake finds out whether the transport works: the receiver proves that it reads the sender's bytes. Containers with a
network or a user of their own cannot connect; they use ZMQ.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Sequence
from typing import ClassVar, Final

import msgspec
import numpy as np

from broker.transports import checksums
from broker.transports.arena import Arena
from broker.transports.base import QUEUE_TENSORS, took_none
from broker.transports.linked import packets
from broker.transports.linked.sender import LinkedConnection
from broker.transports.shm import announce_batch, push_buffer, segment
from broker.transports.shm.announce_batch import AnnounceBatch
from broker.transports.shm.push_buffer import PushBuffer, PushBuffers
from broker.transports.shm.receiver import SCHEME
from broker.transports.shm.segment import ArenaSlice
from broker.transports.shm.wire import NONCE_BYTES, Announce, Hello, Release, ToReceiver, for_sender, pack
from common.errors import TriptychError
from common.messages import TensorHeader
from common.telemetry import get_logger

ARENA_BYTES: Final = 128 * 2**20
"""Address space of one pair; only used pages take memory. Larger tensors get memory of their own."""
KEPT_BYTES: Final = 16 * 2**20
IDLE_S: Final = 1.0
"""An arena empty for so long keeps only the memory of its beginning."""

log = get_logger()


class ShmConnection(LinkedConnection["_Link"]):
    """See broker.transports.base.Connection."""

    scheme: ClassVar[str] = SCHEME
    memory = "shared memory"

    async def send(self, header: TensorHeader, data: memoryview, timeout_s: float) -> None:
        refused_before = self._num_refused
        try:
            async with asyncio.timeout(timeout_s):
                async with self._turn:
                    link = await self._connected(refused_before)
                    room = await link.room(data.nbytes)
                try:
                    checksum = await checksums.copy(data, room.memory.data, hashed=data)
                    await link.announce(room, msgspec.structs.replace(header, checksum=checksum))
                except BaseException:
                    link.release(room)
                    raise
        except TimeoutError as error:
            raise took_none(self._address, timeout_s) from error
        except OSError as error:
            raise TriptychError("unavailable", f"the receiver of tensors at {self._address}: {error}") from error

    def send_now(self, header: TensorHeader, data: memoryview) -> bool:
        """Send if that needs no wait and no turn for others during the copy; else return False. For small tensors,
        awaiting costs more than copying.

        Raises as `send` does where the tensor is larger than the receiver takes.
        """
        link = self._link
        if link is None or link.closed or self._turn.locked() or data.nbytes > checksums.TURN_BYTES:
            return False
        if data.nbytes <= announce_batch.MAX_BYTES and link.bundle(header, data):
            return True
        room = link.room_now(data.nbytes)
        if room is None:
            return False
        announced = False
        try:
            checksum = checksums.copy_now(data, room.memory.data, hashed=data)
            announced = link.announce_now(room, msgspec.structs.replace(header, checksum=checksum))
        finally:
            if not announced:
                link.release(room)
        return announced

    def give(self, header: TensorHeader) -> PushBuffer | None:
        """Share memory with the receiver for a tensor still being computed; None if impossible now.

        Drop the buffer in the end. Other sends meanwhile are fine, of the same tensor as well.
        """
        link = self._link
        if self._closed or link is None or link.closed or not push_buffer.is_worth_it(header.size_bytes):
            return None
        return link.give(header)

    async def _make_link(self, name: str) -> _Link:
        return _Link(name)

    async def _shake_hands(self, link: _Link) -> None:
        await link.shake_hands()


class _Link:
    """The sender's end of one connection. Ends with the other side."""

    def __init__(self, name: str) -> None:
        """Connect. Raises OSError without a listener under `name`."""
        self._lent: dict[int, ArenaSlice] = {}
        self._next_slot = 0
        self._max_bytes = -1  # unknown before the Welcome
        self._changed = asyncio.Event()
        self._arena = Arena(ARENA_BYTES)
        self._used_bytes = 0  # of the arena, since it was last trimmed
        self._trimming: asyncio.TimerHandle | None = None
        self._gifts = PushBuffers(ShmConnection.scheme, self._say)
        self._fd, self._memory = segment.create(ARENA_BYTES)
        try:
            self._packets = packets.PacketSocket(packets.connect(name), self._take, self._lost)
        except BaseException:
            os.close(self._fd)
            raise
        self._bundles = AnnounceBatch(self._packets, self._lend_now)

    @property
    def closed(self) -> bool:
        return self._packets.closed

    async def shake_hands(self) -> None:
        """Pass the arena on and wait until the receiver has read from it. Raises OSError on failure."""
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._memory[:NONCE_BYTES] = np.frombuffer(self._nonce, np.uint8)
        try:
            await self._packets.send(pack(Hello(ARENA_BYTES)), [self._fd])
            while self._max_bytes < 0:
                await self._next_change()
        finally:
            os.close(self._fd)

    async def room(self, num_bytes: int) -> ArenaSlice:
        """Reserve a slice for a tensor, as soon as the receiver has released enough. Raises OSError if the receiver has
        gone.

        One at a time: callers take turns.
        """
        while (room := self.room_now(num_bytes)) is None:
            await self._next_change()
        return room

    def room_now(self, num_bytes: int) -> ArenaSlice | None:
        """Reserve a slice for a tensor; None if memory is short now, or the receiver has gone."""
        if num_bytes > self._max_bytes:
            raise TriptychError("invalid_request", f"{num_bytes} bytes; the receiver takes {self._max_bytes} at most")
        return self._lend_now(num_bytes)

    def bundle(self, header: TensorHeader, data: memoryview) -> bool:
        """Send a small tensor together with others of this turn of the loop; False if the tensor has to go alone."""
        return data.nbytes <= self._max_bytes and self._bundles.add(header, data)

    def _lend_now(self, num_bytes: int) -> ArenaSlice | None:
        """Return None if memory is short now, or the receiver has gone."""
        self._packets.read()  # room given back just now is in the processor's cache, other room is not
        room = None if self.closed else self._find_room(num_bytes)
        if room is not None:
            self._lent[room.slot] = room
            self._next_slot += 1
        return room

    async def announce(self, room: ArenaSlice, header: TensorHeader) -> None:
        """Announce a tensor that lies in its slice. Raises OSError if the receiver has gone."""
        await self._bundles.announced()
        message, fds = _announcement(room, header)
        await self._packets.send(message, fds)

    def announce_now(self, room: ArenaSlice, header: TensorHeader) -> bool:
        """Announce a tensor without waiting; False if impossible."""
        message, fds = _announcement(room, header)
        try:
            return self._bundles.announce() and self._packets.try_send(message, fds)
        except OSError:
            return False

    def give(self, header: TensorHeader) -> PushBuffer | None:
        """Share memory for a tensor; None if the receiver has enough, or accepts nothing now."""
        if header.size_bytes > self._max_bytes:
            return None
        given = self._gifts.give(self._next_slot, header)
        if given is not None:
            self._next_slot += 1
        return given

    def release(self, room: ArenaSlice) -> None:
        """Release a slice. A closed link has released all slices."""
        if self._lent.pop(room.slot, None) is not None:
            if room.fd is None:
                self._arena.release(room.offset)
                self._trim_soon()
            else:
                os.close(room.fd)
            self._changed.set()

    def close(self) -> None:
        """Release everything; pending calls raise OSError."""
        self._bundles.announce()
        self._packets.close()
        self._gifts.close()
        for room in list(self._lent.values()):
            self.release(room)
        if self._trimming is not None:
            self._trimming.cancel()
        self._memory = self._memory[:0].copy()
        self._changed.set()

    def _find_room(self, num_bytes: int) -> ArenaSlice | None:
        """Return None if memory is short now. Tensors larger than the arena go one at a time."""
        if len(self._lent) >= QUEUE_TENSORS:
            return None
        if num_bytes > ARENA_BYTES:
            if any(room.fd is not None for room in self._lent.values()):
                return None
            fd, memory = segment.create(num_bytes)
            return ArenaSlice(self._next_slot, memory, fd=fd)
        offset = self._arena.reserve(num_bytes)
        if offset is None:
            return None
        end = offset + num_bytes
        self._used_bytes = max(self._used_bytes, end)
        return ArenaSlice(self._next_slot, self._memory[offset:end], offset)

    def _trim_soon(self) -> None:
        if self._arena.num_reserved == 0 and self._used_bytes > KEPT_BYTES and self._trimming is None:
            self._trimming = asyncio.get_running_loop().call_later(IDLE_S, self._trim)

    def _trim(self) -> None:
        """Give a burst's memory back to the system; a newer burst ends here again."""
        self._trimming = None
        if self._arena.num_reserved == 0:
            segment.discard(self._memory, KEPT_BYTES)
            self._used_bytes = KEPT_BYTES

    def _say(self, message: ToReceiver, fds: Sequence[int] = ()) -> bool:
        """Send a message at once, from any thread; False if the socket is full, or the receiver has gone."""
        try:
            return self._packets.try_send(pack(message), fds)
        except OSError:
            return False

    async def _next_change(self) -> None:
        self._changed.clear()
        if not self.closed:
            await self._changed.wait()
        if self.closed:
            raise ConnectionResetError("it has closed the connection")

    def _take(self, packet: memoryview, fds: list[int]) -> None:
        packets.close_all(fds)
        message = for_sender(packet)
        if isinstance(message, Release):
            for slot in message.slots:
                if slot not in self._lent:
                    raise ValueError(f"slot {slot} is not lent")
                self.release(self._lent[slot])
            return
        if message.nonce != self._nonce:
            raise ValueError("the receiver does not see this memory")
        self._max_bytes = message.max_bytes
        self._changed.set()

    def _lost(self, error: Exception | None) -> None:
        if error is not None:
            log.warning("shared memory with a receiver has ended", error=str(error))
        self.close()


def _announcement(room: ArenaSlice, header: TensorHeader) -> tuple[bytes, Sequence[int]]:
    fds = () if room.fd is None else (room.fd,)
    return pack(Announce(room.slot, room.offset, room.memory.size, header)), fds
