"""The receiving end of a GPU's memory: opens each sender's arena once and hands out buffers within it.

Whoever uses a buffer copies it to where it belongs, on a stream of its own, and releases it when that stream is done
with it: then the sender is told that the room is its own again. A sender that ends takes nothing with it: its arena
stays open here until the last buffer is released.
"""

from __future__ import annotations

import asyncio
import socket
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import numpy as np

from broker.transports import packets
from broker.transports.base import QUEUE_TENSORS, ReceivedTensor
from broker.transports.cuda_runtime import CudaError, CudaRuntime
from broker.transports.cuda_wire import VERSION, Hello, for_receiver
from broker.transports.listener import SameUserListener
from broker.transports.payload import DeviceBuffer
from broker.transports.shm_receiver import HANDSHAKE_S, boot_id
from broker.transports.shm_wire import NONCE_BYTES, Announce, Release, Welcome
from common.messages import encode
from common.telemetry import get_logger

SCHEME: Final = "cuda+unix"

log = get_logger()


class CudaReceiver:
    """See broker.transports.base.Receiver. Its tensors lie in memory of a GPU."""

    def __init__(self, runtime: CudaRuntime, on_arrival: Callable[[], None], *, max_bytes: int) -> None:
        """Listen. Raises OSError where this system has no sockets of this kind."""
        self._runtime = runtime
        self._max_bytes = max_bytes
        self.num_invalid = 0
        self._on_arrival = on_arrival
        self._arrived: deque[ReceivedTensor] = deque()  # bounded by what each sender may have out
        self._peers: set[_Peer] = set()
        self._listener = SameUserListener(self._begin, self._refused)
        self.address = f"{SCHEME}://{boot_id()}/{self._listener.name}"

    def take(self) -> ReceivedTensor | None:
        return self._arrived.popleft() if self._arrived else None

    def close(self) -> None:
        self._listener.close()
        for peer in list(self._peers):
            self._drop(peer)

    def _begin(self, connected: socket.socket) -> None:
        self._peers.add(_Peer(connected, self._runtime, self._max_bytes, self._deliver, self._ended))

    def _deliver(self, received: ReceivedTensor) -> None:
        self._arrived.append(received)
        self._on_arrival()

    def _refused(self) -> None:
        self.num_invalid += 1
        log.warning("refused a GPU's memory to another user")

    def _ended(self, peer: _Peer, error: Exception | None) -> None:
        if error is not None:
            self.num_invalid += 1
            log.warning("dropped a sender of a GPU's memory", error=str(error))
        self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        self._peers.discard(peer)
        peer.close()


class _Peer:
    """One sender, from its connection to the last of its buffers."""

    def __init__(
        self,
        connected: socket.socket,
        runtime: CudaRuntime,
        max_bytes: int,
        deliver: Callable[[ReceivedTensor], None],
        on_end: Callable[[_Peer, Exception | None], None],
    ) -> None:
        self._runtime = runtime
        self._max_bytes = max_bytes
        self._deliver = deliver
        self._on_end = on_end
        self._greeting: asyncio.Task[None] | None = None
        self._arena: int | None = None
        self._arena_bytes = 0
        self._held: set[int] = set()
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.call_later(HANDSHAKE_S, self._too_late)
        self._packets = packets.PacketSocket(connected, self._take, self._lost)

    def close(self) -> None:
        """End the connection; the arena stays open as long as something of it is held."""
        self._deadline.cancel()
        self._packets.close()
        self._let_go()

    def _lost(self, error: Exception | None) -> None:
        self._on_end(self, error)

    def _too_late(self) -> None:
        self._on_end(self, TimeoutError(f"a connection said nothing for {HANDSHAKE_S:g} s"))

    def _take(self, packet: memoryview, fds: list[int]) -> None:
        packets.close_all(fds)
        message = for_receiver(packet)
        if isinstance(message, Hello):
            if self._greeting is not None or message.version != VERSION:
                raise ValueError(f"a greeting of version {message.version}, or a second one")
            self._greeting = asyncio.create_task(self._greet(message))
        else:
            self._receive(message)

    async def _greet(self, hello: Hello) -> None:
        """Open the arena and say back what is read there."""
        try:
            self._arena, nonce = await asyncio.to_thread(self._open, hello)
            self._arena_bytes = hello.arena_bytes
            if not self._packets.closed:
                self._packets.try_send(encode(Welcome(nonce, self._max_bytes)))
                self._deadline.cancel()
        except (CudaError, OSError, ValueError) as error:
            self._on_end(self, error)
        if self._packets.closed:
            self._let_go()

    def _open(self, hello: Hello) -> tuple[int, bytes]:
        """Another process's arena, and the nonce that is read there. Blocks. Raises CudaError, ValueError."""
        if not self._runtime.can_read(hello.device_id):
            raise ValueError(f"GPU {self._runtime.device_id} cannot read the memory of GPU {hello.device_id}")
        if hello.nonce_offset + NONCE_BYTES > hello.arena_bytes:
            raise ValueError(f"a nonce at byte {hello.nonce_offset} of {hello.arena_bytes}")
        arena = self._runtime.open(hello.handle)
        try:
            return arena, self._read(arena + hello.nonce_offset, NONCE_BYTES)
        except BaseException:
            self._runtime.close(arena)
            raise

    def _read(self, pointer: int, num_bytes: int) -> bytes:
        """Bytes of a GPU's memory, brought to the host."""
        host, stream = np.zeros(num_bytes, np.uint8), self._runtime.make_stream()
        try:
            self._runtime.copy(host.ctypes.data, pointer, num_bytes, stream)
            self._runtime.synchronize(stream)
        finally:
            self._runtime.destroy_stream(stream)
        return host.tobytes()

    def _receive(self, announced: Announce) -> None:
        size = announced.size_bytes
        if self._arena is None or size > self._max_bytes:
            raise ValueError(f"a tensor of {size} bytes; greeted: {self._arena is not None}, at most {self._max_bytes}")
        if announced.slot in self._held or len(self._held) >= QUEUE_TENSORS:
            raise ValueError(f"slot {announced.slot} again, or more than {QUEUE_TENSORS} tensors on their way")
        if announced.offset + size > self._arena_bytes:
            raise ValueError(f"a tensor ends at byte {announced.offset + size} of {self._arena_bytes}")
        buffer = DeviceBuffer(self._arena + announced.offset, size)
        self._held.add(announced.slot)
        unused = weakref.finalize(buffer, self._unused, announced.slot)  # calls it once, at the latest with the buffer
        unused.atexit = False
        self._deliver(ReceivedTensor(announced.header, buffer, _release=unused))

    def _unused(self, slot: int) -> None:
        """Nothing reads the slot any more. Called by whatever thread has let go of it."""
        with suppress(RuntimeError):  # the loop is closed: so is the connection
            self._loop.call_soon_threadsafe(self._release, slot)

    def _release(self, slot: int) -> None:
        self._held.discard(slot)
        if self._packets.closed:
            self._let_go()
            return
        try:
            sent = self._packets.try_send(encode(Release(slot)))
        except OSError as error:
            self._on_end(self, error)
            return
        if not sent:  # a socket holds far more than QUEUE_TENSORS of them
            self._on_end(self, BlockingIOError("the sender reads no releases"))

    def _let_go(self) -> None:
        """Close the arena if nothing of it is held."""
        if self._arena is not None and not self._held:
            arena, self._arena = self._arena, None
            self._loop.run_in_executor(None, self._close_arena, arena)

    def _close_arena(self, arena: int) -> None:
        try:
            self._runtime.close(arena)
        except CudaError as error:
            log.warning("a sender's memory was not closed", error=str(error))
