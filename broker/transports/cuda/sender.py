"""Tensors between GPUs of a host, or within a GPU, by CUDA's sharing of memory between processes (CUDA IPC).

    sender                                                   receiver
    +------------ arena, in the GPU's memory ------------+
    | tensor | free | tensor |           free            |   opened once; tensors are copied out of it
    +----------------------------------------------------+
       Unix socket: announce -->   <-- release

The sender copies a tensor into its arena, on a stream of its own, waits for that stream in a thread, and only then
announces the tensor. No byte passes through the host, and no engine's stream waits.

Both processes must belong to one user on one host, and the receiver must prove that its GPU reads the sender's memory.
Otherwise another transport is chosen. It has run on one GPU; tests run two processes over memory of the host
(tests/broker/transports/fake_cuda.py).
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from typing import ClassVar, Final

from broker.transports.base import QUEUE_TENSORS
from broker.transports.cuda.arena import ARENA_BYTES, ExportArena
from broker.transports.cuda.receiver import SCHEME
from broker.transports.cuda.runtime import CudaError, CudaRuntime
from broker.transports.cuda.wire import ArenaHello
from broker.transports.linked.sender import Link, LinkedConnection
from broker.transports.linked.wire import NONCE_BYTES, Announce
from broker.transports.payload import DeviceBuffer
from common.messages import TensorHeader, encode
from common.telemetry import get_logger

LINK_SHARE: Final = 2
"""A receiver holds at most this part (a half) of the arena: a stopped receiver leaves memory to the others."""

log = get_logger()


class CudaSender:
    """The arena of all connections of one process."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self.device_id = runtime.device_id
        self._runtime = runtime
        self._arena: asyncio.Task[ExportArena] | None = None
        self._closed = False

    async def arena(self) -> ExportArena:
        """Return the process's arena, made at the first call. Raises CudaError if the device is out of memory."""
        if self._closed:
            raise CudaError("this sender has been closed")
        if self._arena is None or (self._arena.done() and self._arena.exception() is not None):
            self._arena = asyncio.create_task(asyncio.to_thread(ExportArena, self._runtime, ARENA_BYTES))
        return await asyncio.shield(self._arena)  # who gives up leaves it to the next one

    def close(self) -> None:
        """Free the arena, once all connections are closed. Idempotent."""
        self._closed = True
        if self._arena is not None and self._arena.done():
            _close_arena(self._arena)
        elif self._arena is not None:
            self._arena.add_done_callback(_close_arena)


def _close_arena(made: asyncio.Task[ExportArena]) -> None:
    if not made.cancelled() and made.exception() is None:
        made.result().close()


class CudaConnection(LinkedConnection["CudaLink", DeviceBuffer]):
    """CUDA's broker.transports.base.Connection, for memory of a GPU."""

    scheme: ClassVar[str] = SCHEME
    refusals = (OSError, CudaError)
    memory = "memory of a GPU"

    def __init__(self, sender: CudaSender, address: str) -> None:
        super().__init__(address)
        self._sender = sender

    def carries(self, num_bytes: int) -> bool:
        """Return whether a tensor is small enough: no receiver holds more of the arena."""
        return num_bytes <= ARENA_BYTES // LINK_SHARE

    async def _make_link(self, name: str) -> CudaLink:
        return CudaLink(name, await self._sender.arena(), self._sender.device_id)


@dataclass
class _DeviceSlice:
    """The slice of a tensor. An abandoned slice is free once no copy writes to the slice."""

    slot: int
    offset: int
    num_bytes: int
    is_copied_to: bool = False
    is_abandoned: bool = False


class CudaLink(Link[DeviceBuffer, _DeviceSlice]):
    """The sender's end of a connection, with slices of the process's arena."""

    def __init__(self, name: str, arena: ExportArena, device_id: str) -> None:
        super().__init__(name, arena.changed)
        self._arena = arena
        self._device_id = device_id

    async def shake_hands(self) -> None:
        nonce = secrets.token_bytes(NONCE_BYTES)
        part = await self.reserve(NONCE_BYTES)
        try:
            await self._copy(part, nonce)
            self._nonce = nonce
            hello = ArenaHello(self._arena.handle, self._arena.size_bytes, self._offset(part), self._device_id)
            await self._packets.send(encode(hello))
            while self._max_bytes < 0:
                await self._next_change()
        finally:
            self.release(part)

    def reserve_now(self, num_bytes: int) -> _DeviceSlice | None:
        """Reserve a slice; None if memory is short now, or this receiver holds its share."""
        held = sum(part.num_bytes for part in self._reserved.values())
        if len(self._reserved) >= QUEUE_TENSORS or held + num_bytes > self._arena.size_bytes // LINK_SHARE:
            return None
        if (offset := self._arena.reserve(num_bytes)) is None:
            return None
        part = _DeviceSlice(next(self._slots), offset, num_bytes)
        self._reserved[part.slot] = part
        return part

    async def write(self, part: _DeviceSlice, header: TensorHeader, data: DeviceBuffer) -> TensorHeader:
        """Copy a tensor to its slice, and wait for the end of the copy. Raises CudaError."""
        await self._copy(part, data)
        return header

    async def announce(self, part: _DeviceSlice, header: TensorHeader) -> None:
        await self._packets.send(encode(Announce(part.slot, self._offset(part), part.num_bytes, header)))

    def release(self, part: _DeviceSlice) -> None:
        """Release a slice, now or after the pending copy. A closed link has released all slices."""
        part.is_abandoned = True
        if not part.is_copied_to and self._reserved.pop(part.slot, None) is not None:
            self._arena.release(part.offset)

    async def _copy(self, part: _DeviceSlice, data: DeviceBuffer | bytes) -> None:
        """Copy to a slice in a thread, perhaps after the caller was cancelled: the slice stays reserved until then."""

        def note_end(copying: asyncio.Future[None]) -> None:
            if not copying.cancelled():
                copying.exception()  # retrieved: an abandoned copy has no other caller
            part.is_copied_to = False
            if part.is_abandoned:
                self.release(part)

        copying = asyncio.get_running_loop().run_in_executor(None, self._arena.write, self._offset(part), data)
        part.is_copied_to = True
        copying.add_done_callback(note_end)
        await asyncio.shield(copying)

    def _offset(self, part: _DeviceSlice) -> int:
        """Return the offset of a slice. Raises OSError if the connection has ended meanwhile."""
        if part.is_abandoned:
            raise ConnectionResetError("it has closed the connection")
        return part.offset

    def _end(self, error: Exception | None) -> None:
        if error is not None:
            log.warning("a GPU's memory with a receiver has ended", error=str(error))
        self.close()
