"""The receiving end of shared memory: reads the senders' memory where it is.

A tensor's bytes are a view of the sender's arena, mapped read-only. When the last view is gone, the sender is told that
the room is its own again. A sender that dies takes nothing with it: what has arrived stays mapped until it is released.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from broker.transports import packets, segment
from broker.transports.base import QUEUE_TENSORS, ReceivedTensor
from broker.transports.listener import SameUserListener
from broker.transports.shm_wire import NONCE_BYTES, VERSION, Announce, Hello, Release, Welcome, for_receiver, pack
from common.telemetry import get_logger

SCHEME: Final = "shm+unix"
HANDSHAKE_S: Final = 2.0

log = get_logger()


def boot_id() -> str:
    """Tells this running kernel from any other: two processes with the same one are on the same host."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


class ShmReceiver:
    """See broker.transports.base.Receiver. Serves processes of the same user on the same host only."""

    def __init__(self, on_arrival: Callable[[], None], *, max_bytes: int) -> None:
        """Listen. Raises OSError where this system has no shared memory of this kind."""
        self._on_arrival = on_arrival
        self._max_bytes = max_bytes
        self.num_invalid = 0
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
        self._peers.add(_Peer(connected, self._max_bytes, self._deliver, self._ended))

    def _refused(self) -> None:
        self.num_invalid += 1
        log.warning("refused shared memory to another user")

    def _deliver(self, received: ReceivedTensor) -> None:
        self._arrived.append(received)
        self._on_arrival()

    def _ended(self, peer: _Peer, error: Exception | None) -> None:
        if error is not None:
            self.num_invalid += 1
            log.warning("dropped a sender of shared memory", error=str(error))
        self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        self._peers.discard(peer)
        peer.close()


class _Peer:
    """One sender, from its connection to its end."""

    def __init__(
        self,
        connected: socket.socket,
        max_bytes: int,
        deliver: Callable[[ReceivedTensor], None],
        on_end: Callable[[_Peer, Exception | None], None],
    ) -> None:
        self._max_bytes = max_bytes
        self._deliver = deliver
        self._on_end = on_end
        self._arena: segment.Bytes | None = None
        self._held: set[int] = set()
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._deadline = self._loop.call_later(HANDSHAKE_S, self._too_late)
        self._packets = packets.PacketSocket(connected, self._take, self._lost)

    def close(self) -> None:
        self._deadline.cancel()
        self._packets.close()
        self._arena = None

    def _lost(self, error: Exception | None) -> None:
        self._on_end(self, error)

    def _too_late(self) -> None:
        self._on_end(self, TimeoutError(f"a connection said nothing for {HANDSHAKE_S:g} s"))

    def _take(self, packet: memoryview, fds: list[int]) -> None:
        try:
            message = for_receiver(packet)
            if isinstance(message, Hello):
                self._greet(message, fds)
            else:
                self._receive(message, fds)
        finally:
            packets.close_all(fds)

    def _greet(self, hello: Hello, fds: list[int]) -> None:
        if self._arena is not None or hello.version != VERSION or len(fds) != 1:
            raise ValueError(f"a greeting of version {hello.version} with {len(fds)} descriptors")
        self._arena = segment.open_received(fds[0], hello.arena_bytes)
        self._packets.try_send(pack(Welcome(self._arena[:NONCE_BYTES].tobytes(), self._max_bytes)))
        self._deadline.cancel()

    def _receive(self, announced: Announce, fds: list[int]) -> None:
        size, memory = announced.size_bytes, self._arena
        if memory is None or size > self._max_bytes:
            raise ValueError(f"a tensor of {size} bytes; greeted: {memory is not None}, at most {self._max_bytes}")
        if announced.slot in self._held or len(self._held) >= QUEUE_TENSORS:
            raise ValueError(f"slot {announced.slot} again, or more than {QUEUE_TENSORS} tensors on their way")
        if fds:
            memory = segment.open_received(fds[0], size)
        end = announced.offset + size
        if end > memory.size:
            raise ValueError(f"a tensor ends at byte {end} of {memory.size}")
        room = memory[announced.offset : end]
        self._held.add(announced.slot)
        weakref.finalize(room, self._unused, announced.slot).atexit = False
        self._deliver(ReceivedTensor(announced.header, room.data))

    def _unused(self, slot: int) -> None:
        """Nothing looks at the slot any more. Called by whatever thread has let go of it."""
        if threading.get_ident() == self._thread_id:
            self._release(slot)
            return
        with suppress(RuntimeError):  # the loop is closed: so is the connection
            self._loop.call_soon_threadsafe(self._release, slot)

    def _release(self, slot: int) -> None:
        self._held.discard(slot)
        if self._packets.closed:
            return
        try:
            sent = self._packets.try_send(pack(Release(slot)))
        except OSError as error:
            self._on_end(self, error)
            return
        if not sent:  # a socket holds far more than QUEUE_TENSORS of them
            self._on_end(self, BlockingIOError("the sender reads no releases"))
