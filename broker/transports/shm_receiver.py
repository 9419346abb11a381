"""The receiving end of shared memory: reads the senders' memory where it is.

A tensor's bytes are a view of the sender's arena, mapped read-only. When the last view is gone, the sender is told that
the room is its own again. A sender that dies takes nothing with it: what has arrived stays mapped until it is released.
"""

from __future__ import annotations

import socket
import threading
import weakref
from typing import Final

from broker.transports import packets, segment
from broker.transports.base import ReceivedTensor
from broker.transports.linked_receiver import LinkedPeer, LinkedReceiver
from broker.transports.shm_wire import NONCE_BYTES, VERSION, Announce, Hello, Welcome, for_receiver, pack

SCHEME: Final = "shm+unix"


class ShmReceiver(LinkedReceiver):
    """See broker.transports.base.Receiver. Serves processes of the same user on the same host only."""

    link_scheme = SCHEME
    memory = "shared memory"

    def _make_peer(self, connected: socket.socket) -> LinkedPeer:
        return _Peer(connected, self, self._max_bytes)


class _Peer(LinkedPeer):
    """One sender, whose arena is mapped here."""

    def __init__(self, connected: socket.socket, receiver: ShmReceiver, max_bytes: int) -> None:
        super().__init__(connected, receiver, max_bytes)
        self._arena: segment.Bytes | None = None
        self._thread_id = threading.get_ident()

    def close(self) -> None:
        super().close()
        self._arena = None

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
        self._check(announced, greeted=memory is not None)
        assert memory is not None
        if fds:
            memory = segment.open_received(fds[0], size)
        end = announced.offset + size
        if end > memory.size:
            raise ValueError(f"a tensor ends at byte {end} of {memory.size}")
        room = memory[announced.offset : end]
        self._held.add(announced.slot)
        weakref.finalize(room, self._unused, announced.slot).atexit = False
        self._receiver.deliver(ReceivedTensor(announced.header, room.data))

    def _unused(self, slot: int) -> None:
        """Nothing looks at the slot any more. Called by whatever thread has let go of it."""
        if threading.get_ident() == self._thread_id:
            self._release(slot)
            return
        super()._unused(slot)
