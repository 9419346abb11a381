"""A GPU's memory that NIXL knows: registered once in a process, lent in rooms to tensors on their way.

To register memory takes far longer than to copy a tensor. So it is done for one arena, when it is first needed, at
either end; what has been received is copied on from there, as with `cuda`, and its room goes back.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from broker.transports.base import ReceivedTensor
from broker.transports.cuda.arena import DeviceArena
from broker.transports.cuda.runtime import CudaError, CudaRuntime
from broker.transports.nixl.agent import Memory, NixlAgent, NixlError
from broker.transports.nixl.registered_buffer import RegisteredBuffer
from broker.transports.payload import DeviceBuffer
from common.messages import TensorHeader
from common.telemetry import get_logger

_SETTLE_S: Final = 0.2
"""How often who waits for room looks whether a transfer that was given up has ended."""

log = get_logger()


class NixlArena:
    """Belongs to the loop. The device has its memory back once this is closed and the last room is free."""

    def __init__(self, runtime: CudaRuntime, agent: NixlAgent, size_bytes: int) -> None:
        """Takes no memory yet."""
        self._runtime = runtime
        self._agent = agent
        self._size_bytes = size_bytes
        self._opening: asyncio.Task[Memory] | None = None
        self._made: tuple[DeviceArena, Memory] | None = None
        self._closed = False

    async def open(self) -> Memory:
        """The memory, registered. Raises NixlError, now and ever after, where the device has no room for it or UCX
        does not know such memory: that is logged once."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
            self._opening.add_done_callback(_heard)
        return await asyncio.shield(self._opening)  # who gives up leaves it to the next one

    @property
    def has_failed(self) -> bool:
        """Whether `open` raises."""
        opening = self._opening
        return opening is not None and opening.done() and (opening.cancelled() or opening.exception() is not None)

    async def lend(self, num_bytes: int) -> RegisteredBuffer:
        """Room for a tensor, as soon as there is some: who calls has a deadline. Raises NixlError as `open`."""
        memory = await self.open()
        while (offset := self._arena.lend(num_bytes)) is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_SETTLE_S):
                    await self._arena.next_change()
            self._agent.settle()
        return RegisteredBuffer(memory.where, memory.address + offset, partial(self._give_back, offset))

    async def write(self, room: RegisteredBuffer, start: int, data: DeviceBuffer | bytes) -> None:
        """Copy something to a room, from `start` on; it is there when this returns. Raises CudaError, NixlError."""
        await self._aside(room, self._arena.write, self._offset(room) + start, data)

    async def read(self, room: RegisteredBuffer, num_bytes: int) -> bytes:
        """What lies in a room, brought to the host. Raises as `write`."""
        return bytes(await self._aside(room, self._arena.read, self._offset(room), num_bytes))

    def hand_out(self, header: TensorHeader, room: RegisteredBuffer, num_bytes: int) -> ReceivedTensor:
        """What has been received into a room, which is free once that is released."""
        buffer = DeviceBuffer(room.address, num_bytes)
        unused = weakref.finalize(buffer, _let_go, asyncio.get_running_loop(), room)  # at the latest with the buffer
        unused.atexit = False
        return ReceivedTensor(header, buffer, _release=unused)

    def close(self) -> None:
        """Lend nothing more. Twice is fine."""
        self._closed = True
        self._free_if_unused()

    @property
    def _arena(self) -> DeviceArena:
        if self._closed or self._made is None:
            raise NixlError("the memory for tensors on their way has been given back")
        return self._made[0]

    def _offset(self, room: RegisteredBuffer) -> int:
        return room.address - self._arena.pointer

    async def _aside(self, room: RegisteredBuffer, copy: Callable[..., Any], *arguments: object) -> Any:
        """Copy in a thread. The room is not free before that is done, even where the caller does not wait for it."""
        room.hold()
        copying = asyncio.get_running_loop().run_in_executor(None, copy, *arguments)
        copying.add_done_callback(partial(_copied, room))
        return await asyncio.shield(copying)

    async def _open(self) -> Memory:
        try:
            arena = await asyncio.to_thread(DeviceArena, self._runtime, self._size_bytes)
            try:
                memory = self._registered(arena)
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

    def _registered(self, arena: DeviceArena) -> Memory:
        """The device is made current on the loop's thread, where UCX is called, now and later."""
        self._runtime.make_current()
        return Memory(self._agent, arena.pointer, arena.size_bytes, self._runtime.nixl_memory)

    def _give_back(self, offset: int) -> None:
        assert self._made is not None
        self._made[0].give_back(offset)
        self._free_if_unused()

    def _free_if_unused(self) -> None:
        """Once closed, and nothing is lent."""
        if self._closed and self._made is not None and self._made[0].num_lent == 0:
            (arena, memory), self._made = self._made, None
            memory.deregister()
            arena.close()


def _copied(room: RegisteredBuffer, copying: asyncio.Future[Any]) -> None:
    _heard(copying)
    room.let_go()


def _heard(done: asyncio.Future[Any]) -> None:
    """Nobody else asks for its error where the callers have given up."""
    if not done.cancelled():
        done.exception()


def _let_go(loop: asyncio.AbstractEventLoop, room: RegisteredBuffer) -> None:
    """Called by whatever thread does not need what was handed out any more."""
    with suppress(RuntimeError):  # the loop is closed: so is the arena
        loop.call_soon_threadsafe(room.let_go)
