"""The receiving end of shared memory: reads tensors in the senders' memory.

A tensor's bytes are a view of the sender's arena, mapped read-only until the last view ends, even after the sender's
death. A pushed tensor has memory of its own, which stays here.
"""

from __future__ import annotations

import socket
import weakref

from broker.transports.arena import aligned
from broker.transports.linked import packets
from broker.transports.linked.receiver import LinkedPeer, LinkedReceiver
from broker.transports.linked.wire import NONCE_BYTES, Announce, Welcome
from broker.transports.received import Bytes, PushTarget, ReceivedTensor
from broker.transports.shm import push_buffer, segment
from broker.transports.shm.wire import (
    SCHEME,
    VERSION,
    AnnounceBatch,
    Hello,
    PushOffer,
    PushWithdraw,
    Written,
    for_receiver,
)
from common.messages import encode
from common.telemetry import get_logger

log = get_logger()


class ShmReceiver(LinkedReceiver):
    """See broker.transports.base.Receiver. Serves processes of the same user on the same host only."""

    link_scheme = SCHEME
    memory = "shared memory"

    def _make_peer(self, connected: socket.socket) -> LinkedPeer:
        return ShmPeer(connected, self, self._max_bytes)


class ShmPeer(LinkedPeer):
    """A sender, whose arena is mapped here."""

    def __init__(self, connected: socket.socket, receiver: ShmReceiver, max_bytes: int) -> None:
        super().__init__(connected, receiver, max_bytes)
        self._pushed: dict[int, PushTarget] = {}
        self._arena: Bytes | None = None

    def close(self) -> None:
        super().close()
        self._arena = None
        for target in self._pushed.values():
            target.discard()
        self._pushed.clear()

    def _handle(self, packet: memoryview, fds: list[int]) -> None:
        try:
            message = for_receiver(packet)
            match message:
                case Hello():
                    if self._arena is not None or message.version != VERSION or len(fds) != 1:
                        raise ValueError(f"a greeting of version {message.version} with {len(fds)} descriptors")
                    self._arena = segment.open_received(fds[0], message.arena_bytes)
                    self._packets.try_send(encode(Welcome(self._arena[:NONCE_BYTES].tobytes(), self._max_bytes)))
                    self._deadline.cancel()
                case PushOffer():
                    self._begin_push(message, fds)
                case Written(slot=slot, num_bytes=num_bytes):
                    self._target(slot).read_to(num_bytes)
                case PushWithdraw(slot=slot):
                    self._target(slot).discard()
                    del self._pushed[slot]
                case Announce(slot=slot) if slot in self._pushed:
                    self._receive_pushed(message)
                case AnnounceBatch():
                    self._receive_batch(message)
                case Announce():
                    self._receive(message, fds)
        finally:
            packets.close_all(fds)

    def _begin_push(self, message: PushOffer, fds: list[int]) -> None:
        slot, size = message.slot, message.header.size_bytes
        if self._arena is None or not 0 < size <= min(self._max_bytes, push_buffer.MAX_BYTES) or len(fds) != 1:
            raise ValueError(f"memory of {size} bytes is given, in {len(fds)} descriptors")
        if slot in self._pushed or slot in self._held or len(self._pushed) >= push_buffer.MAX_PUSHES:
            raise ValueError(f"slot {slot} again, or more than {push_buffer.MAX_PUSHES} push buffers at once")
        try:
            memory = segment.open_received(fds[0], size, writable=True)
        except OSError as error:  # too many mappings: the tensor has to come another way
            log.warning("memory for a tensor cannot be mapped", error=str(error))
            memory = None
        target = self._pushed[slot] = PushTarget(message.header, memory)
        self._receiver.deliver(target)

    def _target(self, slot: int) -> PushTarget:
        if slot not in self._pushed:
            raise ValueError(f"nothing was given as slot {slot}")
        return self._pushed[slot]

    def _receive_pushed(self, announced: Announce) -> None:
        target = self._pushed.pop(announced.slot)
        received = target.complete(announced.header)
        # Discarded memory is a tensor without bytes, so that the sender gets a receipt.
        self._receiver.deliver(received or ReceivedTensor(announced.header, memoryview(b"")))

    def _receive(self, announced: Announce, fds: list[int]) -> None:
        size, memory = announced.size_bytes, self._arena
        self._check(announced.slot, size, greeted=memory is not None)
        assert memory is not None
        if fds:
            memory = segment.open_received(fds[0], size)
        data = self._view(announced.slot, memory, announced.offset, size)
        self._receiver.deliver(ReceivedTensor(announced.header, data))

    def _receive_batch(self, batch: AnnounceBatch) -> None:
        self._check(batch.slot, max(header.size_bytes for header in batch.headers), greeted=self._arena is not None)
        assert self._arena is not None
        ends, end = [], 0
        for header in batch.headers:
            end = aligned(end) + header.size_bytes
            ends.append(end)
        data = self._view(batch.slot, self._arena, batch.offset, end)
        for header, end in zip(batch.headers, ends, strict=True):
            self._receiver.deliver(ReceivedTensor(header, data[end - header.size_bytes : end]))

    def _view(self, slot: int, memory: Bytes, offset: int, size: int) -> memoryview:
        """Return part of a sender's memory, released when its last view is gone."""
        end = offset + size
        if end > memory.size:
            raise ValueError(f"a tensor ends at byte {end} of {memory.size}")
        part = memory[offset:end]
        self._held[slot] = weakref.ref(part, lambda _: self._unused(slot))
        return part.data
