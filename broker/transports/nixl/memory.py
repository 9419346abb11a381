"""Registered memory for tensors on their way: of the host, new for each tensor, or one arena of a GPU.

Registering a GPU's memory takes far longer than copying a tensor. So each end registers a single arena, with the first
use. A received tensor is copied on from the arena, as with `cuda`, and its slice is released.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, Final, TypeAlias

from broker.transports.cuda.arena import DeviceArena
from broker.transports.cuda.runtime import CudaError, CudaRuntime
from broker.transports.nixl.agent import HostMemory, NixlAgent, NixlError, RegisteredBuffer, RegisteredMemory
from broker.transports.payload import DeviceBuffer
from broker.transports.received import ReceivedTensor
from common.messages import TensorHeader
from common.telemetry import get_logger

HOST_SCHEME: Final = "nixl+tcp"
CUDA_SCHEME: Final = "nixl+cuda+tcp"
"""Tells senders that the receiver has a GPU, which tensors of theirs can reach."""
RECEIVE_BYTES: Final = 128 * 2**20
"""Of the device, for each process that receives so: less than `cuda` takes of a sender."""
MAX_TENSOR_BYTES: Final = RECEIVE_BYTES // 2
"""Of one tensor: when its sender is stopped, the other senders still have memory."""
_SETTLE_S: Final = 0.2
"""Interval at which a wait for memory looks for abandoned transfers that have ended."""

log = get_logger()


class HostReceiveMemory:
    """New memory of the host for each tensor. Belongs to the loop, as NixlArena."""

    scheme: ClassVar[str] = HOST_SCHEME
    has_checksums: ClassVar[bool] = True
    """Without checksums, senders have the last word on tensors."""

    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent

    async def open(self) -> None: ...

    async def reserve(self, num_bytes: int) -> RegisteredBuffer:
        """Reserve memory for a tensor. Raises NixlError."""
        memory = HostMemory(self._agent, max(1, num_bytes))
        return RegisteredBuffer(memory.where, memory.address, memory.deregister, memory.array)

    async def read(self, buffer: RegisteredBuffer, num_bytes: int) -> bytes:
        assert buffer.host is not None
        return bytes(buffer.host[:num_bytes])

    def hand_out(self, header: TensorHeader, buffer: RegisteredBuffer, num_bytes: int) -> ReceivedTensor:
        """Return a received tensor, which takes over the buffer."""
        assert buffer.host is not None
        buffer.release()
        return ReceivedTensor(header, buffer.host[:num_bytes].data)

    def close(self) -> None: ...


class NixlArena:
    """One arena of a GPU, known to NIXL; freed once closed and without slices. Belongs to the loop."""

    scheme: ClassVar[str] = CUDA_SCHEME
    has_checksums: ClassVar[bool] = False

    def __init__(self, runtime: CudaRuntime, agent: NixlAgent, size_bytes: int) -> None:
        """Allocate nothing yet: `open` does."""
        self._runtime = runtime
        self._agent = agent
        self._size_bytes = size_bytes
        self._opening: asyncio.Task[RegisteredMemory] | None = None
        self._made: tuple[DeviceArena, RegisteredMemory] | None = None
        self._closed = False

    async def open(self) -> RegisteredMemory:
        """Return the registered memory. Raises NixlError, now and ever after, without memory known to UCX."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
            self._opening.add_done_callback(_retrieved)
        return await asyncio.shield(self._opening)  # a cancelled caller leaves the memory to the next caller

    @property
    def has_failed(self) -> bool:
        """Whether `open` raises."""
        opening = self._opening
        return opening is not None and opening.done() and (opening.cancelled() or opening.exception() is not None)

    async def reserve(self, num_bytes: int) -> RegisteredBuffer:
        """Reserve a slice for a tensor, as soon as there is memory: callers bring a deadline. Raises as `open`."""
        memory = await self.open()
        while (offset := self._arena.reserve(num_bytes)) is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_SETTLE_S):
                    await self._arena.changed.wait()
            self._agent.settle()
        return RegisteredBuffer(memory.where, memory.address + offset, partial(self._release, offset))

    async def write(self, buffer: RegisteredBuffer, start: int, data: DeviceBuffer | bytes) -> None:
        """Copy `data` into a slice, from `start` on; return when the copy is done. Raises NixlError."""
        await self._in_thread(buffer, self._arena.write, start, data)

    async def read(self, buffer: RegisteredBuffer, num_bytes: int) -> bytes:
        """Bring the bytes of a slice to the host. Raises NixlError."""
        return bytes(await self._in_thread(buffer, self._arena.read, 0, num_bytes))

    def hand_out(self, header: TensorHeader, buffer: RegisteredBuffer, num_bytes: int) -> ReceivedTensor:
        """Return a received tensor, whose release frees the slice; garbage collection is the latest moment."""
        data = DeviceBuffer(buffer.address, num_bytes)
        unused = weakref.finalize(data, _release_on_loop, asyncio.get_running_loop(), buffer)
        unused.atexit = False
        return ReceivedTensor(header, data, _release=unused)

    def close(self) -> None:
        """Reserve nothing more. What was handed out stays valid until its release. Idempotent."""
        self._closed = True
        self._free_if_unused()

    @property
    def _arena(self) -> DeviceArena:
        if self._closed or self._made is None:
            raise NixlError("the memory for tensors on their way has been given back")
        return self._made[0]

    async def _in_thread(self, buffer: RegisteredBuffer, copy: Callable[..., Any], start: int, what: object) -> Any:
        """Copy in a thread. The slice stays reserved until the copy ends, even after a cancelled wait."""
        offset = buffer.address - self._arena.pointer + start
        buffer.acquire()
        copying = asyncio.get_running_loop().run_in_executor(None, copy, offset, what)
        copying.add_done_callback(_retrieved)
        copying.add_done_callback(lambda _: buffer.release())
        try:
            return await asyncio.shield(copying)
        except CudaError as error:
            raise NixlError(str(error)) from error

    async def _open(self) -> RegisteredMemory:
        try:
            arena = await asyncio.to_thread(DeviceArena, self._runtime, self._size_bytes)
            try:
                self._runtime.make_current()  # on the loop's thread, which calls UCX now and later
                memory = RegisteredMemory(self._agent, arena.pointer, arena.size_bytes, self._runtime.nixl_memory)
            except BaseException:
                arena.close()
                raise
        except (CudaError, NixlError) as error:
            if not self._closed:
                log.warning("NIXL does not take this GPU's memory: tensors go through the host's", why=str(error))
            raise NixlError(str(error)) from error
        self._made = arena, memory
        self._free_if_unused()
        return memory

    def _release(self, offset: int) -> None:
        assert self._made is not None
        self._made[0].release(offset)
        self._free_if_unused()

    def _free_if_unused(self) -> None:
        """Free the memory once closed, with no slice reserved."""
        if self._closed and self._made is not None and self._made[0].num_reserved == 0:
            (arena, memory), self._made = self._made, None
            memory.deregister()
            arena.close()


ReceiveMemory: TypeAlias = HostReceiveMemory | NixlArena
"""The memory that one NixlReceiver reads tensors into."""


def _retrieved(done: asyncio.Future[Any]) -> None:
    """Retrieve the error of a task whose callers may all be cancelled."""
    if not done.cancelled():
        done.exception()


def _release_on_loop(loop: asyncio.AbstractEventLoop, buffer: RegisteredBuffer) -> None:
    """Release a slice from any thread."""
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(buffer.release)
