"""The receiving end of a GPU's memory: opens each sender's arena once and hands out buffers within the arena.

The user of a buffer copies the bytes on a stream of its own, and releases the buffer afterwards; then the sender may
reserve the slice again. A dead sender's arena stays open here until the last buffer is released.
"""

from __future__ import annotations

import asyncio
import socket
import weakref
from contextlib import ExitStack
from typing import Final

import numpy as np

from broker.transports.base import OnArrival
from broker.transports.cuda.runtime import CudaError, CudaRuntime
from broker.transports.cuda.wire import VERSION, ArenaHello, for_receiver
from broker.transports.linked import packets
from broker.transports.linked.receiver import LinkedPeer, LinkedReceiver
from broker.transports.linked.wire import NONCE_BYTES, Announce, Welcome
from broker.transports.payload import DeviceBuffer
from broker.transports.received import ReceivedTensor
from common.messages import encode
from common.telemetry import get_logger

SCHEME: Final = "cuda+unix"

log = get_logger()


class CudaReceiver(LinkedReceiver):
    """CUDA's broker.transports.base.Receiver, for tensors in memory of a GPU."""

    link_scheme = SCHEME
    memory = "a GPU's memory"

    def __init__(self, runtime: CudaRuntime, on_arrival: OnArrival, *, max_bytes: int) -> None:
        """Listen. Raises OSError where this system has no sockets of this kind."""
        super().__init__(on_arrival, max_bytes=max_bytes)
        self._runtime = runtime

    def _make_peer(self, connected: socket.socket) -> LinkedPeer:
        return CudaPeer(connected, self, self._runtime, self._max_bytes)


class CudaPeer(LinkedPeer):
    """A sender, until the release of the last buffer."""

    def __init__(self, connected: socket.socket, receiver: CudaReceiver, runtime: CudaRuntime, max_bytes: int) -> None:
        super().__init__(connected, receiver, max_bytes)
        self._runtime = runtime
        self._greeting: asyncio.Task[None] | None = None
        self._arena: int | None = None
        self._arena_bytes = 0

    def close(self) -> None:
        """End the connection; the arena stays open until the last buffer is released."""
        super().close()
        self._close_if_unused()

    def _handle(self, packet: memoryview, fds: list[int]) -> None:
        packets.close_all(fds)
        message = for_receiver(packet)
        if isinstance(message, ArenaHello):
            if self._greeting is not None or message.version != VERSION:
                raise ValueError(f"a greeting of version {message.version}, or a second one")
            self._greeting = asyncio.create_task(self._greet(message))
        else:
            self._receive(message)

    async def _greet(self, hello: ArenaHello) -> None:
        """Open the arena, and answer with its nonce."""
        try:
            self._arena, nonce = await asyncio.to_thread(self._open, hello)
            self._arena_bytes = hello.arena_bytes
            if not self._packets.closed:
                self._packets.try_send(encode(Welcome(nonce, self._max_bytes)))
                self._deadline.cancel()
        except (CudaError, OSError, ValueError) as error:
            self._end(error)
        except Exception as error:  # a bug: without an end here, the sender would wait for the answer in vain
            log.error("a connection between processes ends by a fault of this process", exc_info=True)
            self._end(error)
        self._close_if_unused()

    def _open(self, hello: ArenaHello) -> tuple[int, bytes]:
        """Return another process's arena, and the nonce read from the arena. Blocks. Raises CudaError, ValueError."""
        runtime, nonce = self._runtime, np.zeros(NONCE_BYTES, np.uint8)
        if not runtime.can_read(hello.device_id):
            raise ValueError(f"GPU {runtime.device_id} cannot read the memory of GPU {hello.device_id}")
        if hello.nonce_offset + NONCE_BYTES > hello.arena_bytes:
            raise ValueError(f"a nonce at byte {hello.nonce_offset} of {hello.arena_bytes}")
        with ExitStack() as undo:
            arena = runtime.open(hello.handle)
            undo.callback(runtime.close, arena)
            stream = runtime.make_stream()
            try:
                runtime.copy(nonce.ctypes.data, arena + hello.nonce_offset, NONCE_BYTES, stream)
                runtime.synchronize(stream)
            finally:
                runtime.destroy_stream(stream)
            undo.pop_all()
        return arena, nonce.tobytes()

    def _receive(self, announced: Announce) -> None:
        size = announced.size_bytes
        self._check(announced.slot, size, greeted=self._arena is not None)
        assert self._arena is not None
        if announced.offset + size > self._arena_bytes:
            raise ValueError(f"a tensor ends at byte {announced.offset + size} of {self._arena_bytes}")
        buffer = DeviceBuffer(self._arena + announced.offset, size)
        unused = weakref.finalize(buffer, self._unused, announced.slot)  # calls it once, at the latest with the buffer
        unused.atexit = False
        self._held[announced.slot] = unused
        self._receiver.deliver(ReceivedTensor(announced.header, buffer, _release=unused))

    def _release(self, slot: int) -> None:
        super()._release(slot)
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        """Close the arena once the connection has ended, unless buffers are in use."""
        if self._packets.closed and self._arena is not None and not self._held:
            arena, self._arena = self._arena, None
            self._loop.run_in_executor(None, self._close_arena, arena)

    def _close_arena(self, arena: int) -> None:
        try:
            self._runtime.close(arena)
        except CudaError as error:
            log.warning("a sender's memory was not closed", error=str(error))
