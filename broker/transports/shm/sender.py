"""Tensors through shared memory: between processes of a user on a host, without a system call per byte.

    sender                                             receiver
    +---------------- arena (memfd) ---------------+
    | tensor | free | tensor |        free         |   mapped read-only: tensors are read in place
    +----------------------------------------------+
       Unix socket: announce -->   <-- release

One copy into the arena, none out of it; or, for an early send, one copy into memory that stays the receiver's (see
push_buffer). Neither memory nor socket has a name, so a death leaves nothing behind. In a handshake the receiver proves
that it reads the sender's bytes. Containers with a network or a user of their own cannot connect; they use ZMQ.
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
from broker.transports.arena import Arena, Notifier
from broker.transports.base import QUEUE_TENSORS
from broker.transports.linked.sender import Link, LinkedConnection
from broker.transports.linked.wire import NONCE_BYTES, Announce
from broker.transports.shm import announce_batcher, segment
from broker.transports.shm.announce_batcher import AnnounceBatcher
from broker.transports.shm.push_buffer import PushBuffer, PushBuffers
from broker.transports.shm.segment import ArenaSlice
from broker.transports.shm.wire import SCHEME, Hello, ToReceiver
from common.messages import TensorHeader, encode
from common.telemetry import get_logger

ARENA_BYTES: Final = 128 * 2**20
"""Address space of one pair; only used pages take memory. Larger tensors get memory of their own."""
KEPT_BYTES: Final = 16 * 2**20
IDLE_S: Final = 1.0
"""An arena empty for so long keeps only the memory of its beginning."""

log = get_logger()


class ShmConnection(LinkedConnection["ShmLink", memoryview]):
    """See broker.transports.base.Connection."""

    scheme: ClassVar[str] = SCHEME
    memory = "shared memory"

    def send_now(self, header: TensorHeader, data: memoryview) -> bool:
        """Send if that needs no wait and no turn for others during the copy; else return False. Raises as `send`.

        For small tensors, awaiting costs more than copying.
        """
        link = self._link
        if link is None or link.closed or self._turn.locked() or data.nbytes > checksums.TURN_BYTES:
            return False
        link.check_size(data.nbytes)
        if data.nbytes <= announce_batcher.MAX_BYTES and link.batcher.add(header, data):
            return True
        part = link.reserve_now(data.nbytes)
        if part is None:
            return False
        announced = False
        try:
            checksum = checksums.copy_now(data, part.memory.data, hashed=data)
            announced = link.announce_now(part, msgspec.structs.replace(header, checksum=checksum))
        finally:
            if not announced:
                link.release(part)
        return announced

    def reserve_early(self, header: TensorHeader) -> PushBuffer | None:
        """Share memory with the receiver for a tensor still being computed, to be discarded; None if impossible."""
        link = self._link
        return None if self._closed or link is None or link.closed else link.reserve_early(header)

    async def _make_link(self, name: str) -> ShmLink:
        return ShmLink(name)


class ShmLink(Link[memoryview, ArenaSlice]):
    """The sender's end of one connection, and the arena of the connection."""

    def __init__(self, name: str) -> None:
        super().__init__(name, Notifier())
        self._arena = Arena(ARENA_BYTES)
        self._used_bytes = 0  # of the arena, since it was last trimmed
        self._trimming: asyncio.TimerHandle | None = None
        try:
            self._fd, self._memory = segment.create(ARENA_BYTES)
        except BaseException:
            self._packets.close()
            raise
        self.batcher = AnnounceBatcher(self._packets, self.reserve_now)
        self._pushes = PushBuffers(self._try_send)

    async def shake_hands(self) -> None:
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._memory[:NONCE_BYTES] = np.frombuffer(self._nonce, np.uint8)
        try:
            await self._packets.send(encode(Hello(ARENA_BYTES)), [self._fd])
            while self._max_bytes < 0:
                await self._next_change()
        finally:
            os.close(self._fd)

    def reserve_now(self, num_bytes: int) -> ArenaSlice | None:
        """Reserve a slice; None if memory is short now. Tensors larger than the arena go one at a time."""
        self._packets.read()  # memory released just now is in the processor's cache, other memory is not
        if self.closed or len(self._reserved) >= QUEUE_TENSORS:
            return None
        if num_bytes > ARENA_BYTES:
            if any(part.fd is not None for part in self._reserved.values()):
                return None
            fd, memory = segment.create(num_bytes)
            part = ArenaSlice(next(self._slots), memory, fd=fd)
        else:
            offset = self._arena.reserve(num_bytes)
            if offset is None:
                return None
            end = offset + num_bytes
            self._used_bytes = max(self._used_bytes, end)
            part = ArenaSlice(next(self._slots), self._memory[offset:end], offset)
        self._reserved[part.slot] = part
        return part

    async def write(self, part: ArenaSlice, header: TensorHeader, data: memoryview) -> TensorHeader:
        checksum = await checksums.copy(data, part.memory.data, hashed=data)
        return msgspec.structs.replace(header, checksum=checksum)

    async def announce(self, part: ArenaSlice, header: TensorHeader) -> None:
        await self.batcher.announced()
        await self._packets.send(*_announcement(part, header))

    def announce_now(self, part: ArenaSlice, header: TensorHeader) -> bool:
        """Announce a tensor without waiting; False if impossible."""
        try:
            return self.batcher.announce() and self._packets.try_send(*_announcement(part, header))
        except OSError:
            return False

    def reserve_early(self, header: TensorHeader) -> PushBuffer | None:
        """Share memory for a tensor; None if the receiver has enough, or accepts nothing now."""
        if header.size_bytes > self._max_bytes:
            return None
        return self._pushes.reserve(next(self._slots), header)

    def release(self, part: ArenaSlice) -> None:
        if self._reserved.pop(part.slot, None) is None:
            return
        if part.fd is not None:
            os.close(part.fd)
        else:
            self._arena.release(part.offset)
            if self._arena.num_reserved == 0 and self._used_bytes > KEPT_BYTES and self._trimming is None:
                self._trimming = asyncio.get_running_loop().call_later(IDLE_S, self._trim)
        self._changed.notify()

    def close(self) -> None:
        self.batcher.announce()
        self._pushes.close()
        super().close()
        if self._trimming is not None:
            self._trimming.cancel()
        self._memory = self._memory[:0].copy()

    def _trim(self) -> None:
        """Return a burst's memory to the system; a newer burst ends here again."""
        self._trimming = None
        if self._arena.num_reserved == 0:
            segment.discard(self._memory, KEPT_BYTES)
            self._used_bytes = KEPT_BYTES

    def _try_send(self, message: ToReceiver, fds: Sequence[int] = ()) -> bool:
        """Send a message at once, from any thread; False if the socket is full, or the receiver has gone."""
        try:
            return self._packets.try_send(encode(message), fds)
        except OSError:
            return False

    def _end(self, error: Exception | None) -> None:
        if error is not None:
            log.warning("shared memory with a receiver has ended", error=str(error))
        self.close()


def _announcement(part: ArenaSlice, header: TensorHeader) -> tuple[bytes, Sequence[int]]:
    fds = () if part.fd is None else (part.fd,)
    return encode(Announce(part.slot, part.offset, part.memory.size, header)), fds
