"""Links over a Unix socket, at the receiver: the common part of shm and cuda."""

from __future__ import annotations

import asyncio
import socket
import threading
from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress
from typing import ClassVar, Final

from broker.transports.base import QUEUE_TENSORS, OnArrival
from broker.transports.linked import packets
from broker.transports.linked.sender import HANDSHAKE_S, boot_id
from broker.transports.linked.wire import Release
from broker.transports.received import Received
from common.messages import encode
from common.telemetry import get_logger

RELEASED_AT_ONCE: Final = 8
"""The sender of so many tensors may wait for the memory of one."""

log = get_logger()


class LinkedReceiver(ABC):
    """See broker.transports.base.Receiver; for one user on one host. `memory` names the shared memory in messages."""

    link_scheme: ClassVar[str]
    memory: ClassVar[str]

    def __init__(self, on_arrival: OnArrival, *, max_bytes: int) -> None:
        """Listen. Raises OSError where this system has no sockets of this kind."""
        self._on_arrival = on_arrival
        self._max_bytes = max_bytes
        self.num_invalid = 0
        self.num_unfinished = 0  # a tensor is announced when all of it is there
        self._arrived: deque[Received] = deque()  # bounded by what each sender may have out
        self._peers: set[LinkedPeer] = set()
        self._listener = packets.SameUserListener(self._begin, self._refused)
        self.address = f"{self.link_scheme}://{boot_id()}/{self._listener.name}"

    def pop(self) -> Received | None:
        return self._arrived.popleft() if self._arrived else None

    def close(self) -> None:
        self._listener.close()
        for peer in list(self._peers):
            self._discard(peer)

    @abstractmethod
    def _make_peer(self, connected: socket.socket) -> LinkedPeer:
        """Make the peer of a connected sender; the peer calls `deliver` and `ended`."""

    def deliver(self, received: Received) -> None:
        """Queue an arrival for `pop`."""
        self._arrived.append(received)
        self._on_arrival(self)

    def ended(self, peer: LinkedPeer, error: Exception | None) -> None:
        """Remove a sender after its end or a violation of the protocol."""
        if error is not None:
            self.num_invalid += 1
            log.warning(f"dropped a sender of {self.memory}", error=str(error))
        self._discard(peer)

    def _begin(self, connected: socket.socket) -> None:
        self._peers.add(self._make_peer(connected))

    def _refused(self) -> None:
        self.num_invalid += 1
        log.warning(f"refused {self.memory} to another user")

    def _discard(self, peer: LinkedPeer) -> None:
        self._peers.discard(peer)
        peer.close()


class LinkedPeer(ABC):
    """A sender, from its connection to its end.

    `_held` has the slots of tensors in use here, each with the object that reports the end of use.
    """

    def __init__(self, connected: socket.socket, receiver: LinkedReceiver, max_bytes: int) -> None:
        self._receiver = receiver
        self._max_bytes = max_bytes
        self._held: dict[int, object] = {}
        self._released: list[int] = []  # not reported to the sender yet
        self._has_reported = False  # in this turn of the loop
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        silent = TimeoutError(f"a connection said nothing for {HANDSHAKE_S:g} s")
        self._deadline = self._loop.call_later(HANDSHAKE_S, self._end, silent)
        self._packets = packets.PacketSocket(connected, self._handle, self._end)

    def close(self) -> None:
        """End the connection. Received tensors stay valid until their release."""
        self._deadline.cancel()
        self._packets.close()

    @abstractmethod
    def _handle(self, packet: memoryview, fds: list[int]) -> None:
        """Handle a packet. Raises ValueError for an invalid packet."""

    def _end(self, error: Exception | None) -> None:
        self._receiver.ended(self, error)

    def _check(self, slot: int, size: int, *, greeted: bool) -> None:
        """Raise ValueError for a forbidden announcement; `size` is the largest tensor's, in bytes."""
        if not greeted or size > self._max_bytes:
            raise ValueError(f"a tensor of {size} bytes; greeted: {greeted}, at most {self._max_bytes}")
        if slot in self._held or len(self._held) >= QUEUE_TENSORS:
            raise ValueError(f"slot {slot} again, or more than {QUEUE_TENSORS} on their way")

    def _unused(self, slot: int) -> None:
        """Release a slot from any thread."""
        with suppress(RuntimeError):  # the loop is closed: so is the connection
            if threading.get_ident() == self._thread_id:
                self._release(slot)
            else:
                self._loop.call_soon_threadsafe(self._release, slot)

    def _release(self, slot: int) -> None:
        """Report a first release at once, and later releases of this turn of the loop together: a report is costly."""
        self._held.pop(slot, None)
        if self._packets.closed:
            return
        self._released.append(slot)
        if not self._has_reported:
            self._has_reported = True
            self._loop.call_soon(self._end_turn)
            self._report()
        elif len(self._released) == RELEASED_AT_ONCE:
            self._report()

    def _end_turn(self) -> None:
        self._has_reported = False
        self._report()

    def _report(self) -> None:
        none: list[int] = []  # made first: while it is, the garbage collector may release other slots
        slots, self._released = self._released, none
        if not slots or self._packets.closed:
            return
        try:
            if not self._packets.try_send(encode(Release(slots))):  # a socket holds far more than QUEUE_TENSORS
                raise BlockingIOError("the sender reads no releases")
        except OSError as error:
            self._end(error)
