"""The receiving end of shared memory: reads tensors in the senders' memory.

A tensor's bytes are a view of the sender's arena, mapped read-only; the end of the last view releases the slice to the
sender. A pushed tensor has memory of its own, which stays here. The death of a sender loses nothing: received tensors
stay mapped until their release.
"""

from __future__ import annotations

import socket
import threading
import weakref
from collections.abc import Callable
from typing import Final

from broker.transports.arena import aligned
from broker.transports.base import ReceivedTensor
from broker.transports.linked import packets
from broker.transports.linked.receiver import LinkedPeer, LinkedReceiver
from broker.transports.shm import push_buffer, segment
from broker.transports.shm.push_target import PushTarget
from broker.transports.shm.wire import (
    NONCE_BYTES,
    VERSION,
    Announce,
    Bundle,
    Give,
    Hello,
    TakeBack,
    Welcome,
    Written,
    for_receiver,
    pack,
)
from common.telemetry import get_logger

SCHEME: Final = "shm+unix"

log = get_logger()


class ShmReceiver(LinkedReceiver):
    """See broker.transports.base.Receiver. Serves processes of the same user on the same host only."""

    link_scheme = SCHEME
    memory = "shared memory"

    def __init__(self, on_arrival: Callable[[], None], *, max_bytes: int) -> None:
        super().__init__(on_arrival, max_bytes=max_bytes)
        self.on_given: Callable[[PushTarget], bool] = _keep
        """Called with memory for a tensor about to arrive; False discards the memory."""

    def _make_peer(self, connected: socket.socket) -> LinkedPeer:
        return _Peer(connected, self, self._max_bytes)


class _Peer(LinkedPeer):
    """A sender, whose arena is mapped here."""

    def __init__(self, connected: socket.socket, receiver: ShmReceiver, max_bytes: int) -> None:
        super().__init__(connected, receiver, max_bytes)
        self._owner = receiver
        self._given: dict[int, PushTarget] = {}
        self._arena: segment.Bytes | None = None
        self._thread_id = threading.get_ident()

    def close(self) -> None:
        super().close()
        self._arena = None
        for room in self._given.values():
            room.discard()
        self._given.clear()

    def _take(self, packet: memoryview, fds: list[int]) -> None:
        try:
            message = for_receiver(packet)
            match message:
                case Hello():
                    self._greet(message, fds)
                case Give():
                    self._take_gift(message, fds)
                case Written(slot=slot, num_bytes=num_bytes):
                    self._room(slot).read_to(num_bytes)
                case TakeBack(slot=slot):
                    self._room(slot).discard()
                    del self._given[slot]
                case Announce(slot=slot) if slot in self._given:
                    self._receive_given(message)
                case Bundle():
                    self._receive_bundle(message)
                case Announce():
                    self._receive(message, fds)
        finally:
            packets.close_all(fds)

    def _greet(self, hello: Hello, fds: list[int]) -> None:
        if self._arena is not None or hello.version != VERSION or len(fds) != 1:
            raise ValueError(f"a greeting of version {hello.version} with {len(fds)} descriptors")
        self._arena = segment.open_received(fds[0], hello.arena_bytes)
        self._packets.try_send(pack(Welcome(self._arena[:NONCE_BYTES].tobytes(), self._max_bytes)))
        self._deadline.cancel()

    def _take_gift(self, message: Give, fds: list[int]) -> None:
        slot, size = message.slot, message.header.size_bytes
        if self._arena is None or not 0 < size <= min(self._max_bytes, push_buffer.MAX_BYTES) or len(fds) != 1:
            raise ValueError(f"memory of {size} bytes is given, in {len(fds)} descriptors")
        if slot in self._given or slot in self._held or len(self._given) >= push_buffer.MAX_GIFTS:
            raise ValueError(f"slot {slot} again, or more than {push_buffer.MAX_GIFTS} gifts at once")
        try:
            memory = segment.open_received(fds[0], size, writable=True)
        except OSError as error:  # too many mappings: the tensor will have to come another way
            log.warning("memory for a tensor cannot be mapped", error=str(error))
            memory = None
        room = self._given[slot] = PushTarget(message.header, memory)
        if not self._owner.on_given(room):
            room.discard()

    def _room(self, slot: int) -> PushTarget:
        if slot not in self._given:
            raise ValueError(f"nothing was given as slot {slot}")
        return self._given[slot]

    def _receive_given(self, announced: Announce) -> None:
        room = self._given.pop(announced.slot)
        received = room.complete(announced.header)
        if received is None:  # without its bytes, so that its sender is told
            self._receiver.deliver(ReceivedTensor(announced.header, memoryview(b"")))
        elif not room.take(received):
            self._receiver.deliver(received)

    def _receive(self, announced: Announce, fds: list[int]) -> None:
        size, memory = announced.size_bytes, self._arena
        self._check(announced.slot, size, greeted=memory is not None)
        assert memory is not None
        if fds:
            memory = segment.open_received(fds[0], size)
        data = self._lent(announced.slot, memory, announced.offset, size)
        self._receiver.deliver(ReceivedTensor(announced.header, data))

    def _receive_bundle(self, bundle: Bundle) -> None:
        self._check(bundle.slot, max(header.size_bytes for header in bundle.headers), greeted=self._arena is not None)
        assert self._arena is not None
        ends, end = [], 0
        for header in bundle.headers:
            end = aligned(end) + header.size_bytes
            ends.append(end)
        data = self._lent(bundle.slot, self._arena, bundle.offset, end)
        for header, end in zip(bundle.headers, ends, strict=True):
            self._receiver.deliver(ReceivedTensor(header, data[end - header.size_bytes : end]))

    def _lent(self, slot: int, memory: segment.Bytes, offset: int, size: int) -> memoryview:
        """Return part of a sender's memory, released when its last view is gone."""
        end = offset + size
        if end > memory.size:
            raise ValueError(f"a tensor ends at byte {end} of {memory.size}")
        room = memory[offset:end]
        self._held[slot] = weakref.ref(room, lambda _: self._unused(slot))
        return room.data

    def _unused(self, slot: int) -> None:
        """Release a slot from any thread."""
        if threading.get_ident() == self._thread_id:
            self._release(slot)
            return
        super()._unused(slot)


def _keep(room: PushTarget) -> bool:
    return True
