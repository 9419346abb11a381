"""Tensors between GPUs of a host, or within a GPU, by CUDA's sharing of memory between processes (CUDA IPC).

    sender                                                   receiver
    +------------ arena, in the GPU's memory ------------+
    | tensor | free | tensor |           free            |   opened once; tensors are copied out of it
    +----------------------------------------------------+
       Unix socket: announce -->   <-- release

The sender copies an output into its arena, on a stream of its own, waits for that stream in a thread, and only then
announces the output. So an announcement says that the bytes are there, and no event is shared between processes. The
cost is one wake-up of a thread per tensor; an engine's stream waits for nothing. No byte passes through the host.

Both processes must belong to one user on one host, as for shared memory, and the receiver must prove that its GPU reads
the sender's memory. Otherwise another transport is chosen. Not run on a GPU yet: tests run two processes over memory of
the host (tests/broker/transports/fake_cuda.py).
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final

from broker.transports.base import QUEUE_TENSORS, took_none
from broker.transports.cuda.arena import ARENA_BYTES, ExportArena
from broker.transports.cuda.receiver import SCHEME
from broker.transports.cuda.runtime import CudaError, CudaRuntime
from broker.transports.cuda.wire import ArenaHello
from broker.transports.linked import packets
from broker.transports.linked.sender import LinkedConnection
from broker.transports.payload import DeviceBuffer
from broker.transports.shm.wire import NONCE_BYTES, Announce, Release, for_sender
from common.errors import TriptychError
from common.messages import TensorHeader, encode
from common.telemetry import get_logger

LINK_SHARE: Final = 2
"""A receiver holds at most this part (a half) of the arena: a stopped receiver leaves memory to the others."""

log = get_logger()


class CudaSender:
    """Makes the connections of one process, all with the same arena."""

    scheme: ClassVar[str] = SCHEME

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._arena: asyncio.Task[ExportArena] | None = None
        self._closed = False

    def connect(self, address: str) -> CudaConnection:
        """Return the connection to an address, without connecting yet."""
        return CudaConnection(self, address)

    @property
    def device_id(self) -> str:
        return self._runtime.device_id

    async def arena(self) -> ExportArena:
        """Return the process's arena, made at the first call. Raises CudaError if the device is out of memory."""
        if self._closed:
            raise CudaError("this sender has been closed")
        if self._arena is None or (self._arena.done() and self._arena.exception() is not None):
            self._arena = asyncio.create_task(asyncio.to_thread(ExportArena, self._runtime, ARENA_BYTES))
        return await asyncio.shield(self._arena)  # who gives up leaves it to the next one

    def close(self) -> None:
        """Give the arena back, once all connections are closed. Twice is fine."""
        self._closed = True
        if self._arena is not None and self._arena.done():
            _close_arena(self._arena)
        elif self._arena is not None:
            self._arena.add_done_callback(_close_arena)


def _close_arena(made: asyncio.Task[ExportArena]) -> None:
    if not made.cancelled() and made.exception() is None:
        made.result().close()


class CudaConnection(LinkedConnection["_Link"]):
    """CUDA's broker.transports.base.Connection, for memory of a GPU."""

    scheme: ClassVar[str] = SCHEME
    refusals = (OSError, CudaError)
    memory = "memory of a GPU"

    def __init__(self, sender: CudaSender, address: str) -> None:
        super().__init__(address)
        self._sender = sender

    async def send(self, header: TensorHeader, data: DeviceBuffer, timeout_s: float) -> None:
        refused_before = self._num_refused
        try:
            async with asyncio.timeout(timeout_s):
                async with self._turn:
                    link = await self._connected(refused_before)
                    slot = await link.room(data.nbytes)
                try:
                    await link.write(slot, data)
                    await link.announce(slot, data.nbytes, header)
                except BaseException:
                    link.release(slot)
                    raise
        except TimeoutError as error:
            raise took_none(self._address, timeout_s) from error
        except (OSError, CudaError) as error:
            raise TriptychError("unavailable", f"the receiver of tensors at {self._address}: {error}") from error

    def carries(self, num_bytes: int) -> bool:
        """Return whether a tensor is small enough: no receiver holds more of the arena."""
        return num_bytes <= ARENA_BYTES // LINK_SHARE

    async def _make_link(self, name: str) -> _Link:
        return _Link(name, await self._sender.arena())

    async def _shake_hands(self, link: _Link) -> None:
        await link.shake_hands(self._sender.device_id)


@dataclass
class _Lent:
    """The slice of a tensor. An abandoned slice is free once no copy writes to the slice."""

    offset: int
    num_bytes: int
    is_copied_to: bool = False
    is_given_up: bool = False


class _Link:
    """The sender's end of a connection. Ends with the other side."""

    def __init__(self, name: str, arena: ExportArena) -> None:
        """Raises OSError without a listener under the name."""
        self._arena = arena
        self._lent: dict[int, _Lent] = {}  # by slot
        self._next_slot = 0
        self._nonce = b""
        self._max_bytes = -1  # unknown before the Welcome
        self._packets = packets.PacketSocket(packets.connect(name), self._take, self._lost)

    @property
    def closed(self) -> bool:
        return self._packets.closed

    async def shake_hands(self, device_id: str) -> None:
        """Pass the arena's handle on and wait until the receiver has read from the arena. Raises OSError, CudaError."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        slot = await self._lend(NONCE_BYTES)
        try:
            await self.write(slot, nonce)
            self._nonce = nonce
            hello = ArenaHello(self._arena.handle, self._arena.size_bytes, self._offset(slot), device_id)
            await self._packets.send(encode(hello))
            while self._max_bytes < 0:
                await self._next_change()
        finally:
            self.release(slot)

    async def room(self, num_bytes: int) -> int:
        """Reserve a slot with memory for a tensor, as soon as memory is free. Raises OSError if the receiver has gone.

        One at a time: callers take turns.
        """
        most = min(self._max_bytes, self._arena.size_bytes // LINK_SHARE)
        if num_bytes > most:
            raise TriptychError("invalid_request", f"{num_bytes} bytes; this way takes {most} at most")
        return await self._lend(num_bytes)

    async def write(self, slot: int, data: DeviceBuffer | bytes) -> None:
        """Copy a tensor to the reserved slice, and wait for the end of the copy. Raises CudaError.

        A thread copies, perhaps after the caller was cancelled: the slice stays reserved until then.
        """
        copying = asyncio.get_running_loop().run_in_executor(None, self._arena.write, self._offset(slot), data)
        self._lent[slot].is_copied_to = True
        copying.add_done_callback(partial(self._copied, slot))
        await asyncio.shield(copying)

    async def announce(self, slot: int, num_bytes: int, header: TensorHeader) -> None:
        """Announce a tensor that lies in its slice. Raises OSError if the receiver has gone."""
        await self._packets.send(encode(Announce(slot, self._offset(slot), num_bytes, header)))

    def release(self, slot: int) -> None:
        """Release a slice, now or after the pending copy. A closed link has released all slices."""
        if (lent := self._lent.get(slot)) is None:
            return
        lent.is_given_up = True
        if not lent.is_copied_to:
            del self._lent[slot]
            self._arena.release(lent.offset)

    def close(self) -> None:
        """Release all slices; pending calls raise OSError."""
        self._packets.close()
        for slot in list(self._lent):
            self.release(slot)
        self._arena.wake()

    async def _lend(self, num_bytes: int) -> int:
        while (offset := self._find(num_bytes)) is None:
            await self._next_change()
        slot = self._next_slot
        self._next_slot += 1
        self._lent[slot] = _Lent(offset, num_bytes)
        return slot

    def _copied(self, slot: int, copying: asyncio.Future[None]) -> None:
        if not copying.cancelled():
            copying.exception()  # nobody else asks for it where the sender has given up
        self._lent[slot].is_copied_to = False
        if self._lent[slot].is_given_up:
            self.release(slot)

    def _offset(self, slot: int) -> int:
        """Return the offset of a slice. Raises OSError if the connection has ended meanwhile."""
        if not self._is_lent(slot):
            raise ConnectionResetError("it has closed the connection")
        return self._lent[slot].offset

    def _is_lent(self, slot: int) -> bool:
        return slot in self._lent and not self._lent[slot].is_given_up

    def _find(self, num_bytes: int) -> int | None:
        """Return None if memory is short now, or this receiver holds its share."""
        held = sum(lent.num_bytes for lent in self._lent.values())
        if len(self._lent) >= QUEUE_TENSORS or held + num_bytes > self._arena.size_bytes // LINK_SHARE:
            return None
        return self._arena.reserve(num_bytes)

    async def _next_change(self) -> None:
        if not self.closed:
            await self._arena.next_change()
        if self.closed:
            raise ConnectionResetError("it has closed the connection")

    def _take(self, packet: memoryview, fds: list[int]) -> None:
        packets.close_all(fds)
        message = for_sender(packet)
        if isinstance(message, Release):
            for slot in message.slots:
                if not self._is_lent(slot):
                    raise ValueError(f"slot {slot} is not lent")
                self.release(slot)
            return
        if not self._nonce or message.nonce != self._nonce:
            raise ValueError("the receiver does not see this memory")
        self._max_bytes = message.max_bytes
        self._arena.wake()

    def _lost(self, error: Exception | None) -> None:
        if error is not None:
            log.warning("a GPU's memory with a receiver has ended", error=str(error))
        self.close()
