"""A link over a Unix socket, at the sender: the common part of shm and cuda."""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Final, Generic, TypeVar

from broker.transports.arena import Notifier
from broker.transports.base import Unreachable, sending
from broker.transports.linked import packets
from broker.transports.linked.wire import Release, for_sender
from broker.transports.payload import DeviceBuffer
from common.errors import TriptychError
from common.messages import TensorHeader

HANDSHAKE_S: Final = 2.0


def boot_id() -> str:
    """Return the id of this running kernel: equal for two processes on the same host."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


Data = TypeVar("Data", memoryview, DeviceBuffer)
Slice = TypeVar("Slice")
"""Memory reserved for one message."""


class Link(ABC, Generic[Data, Slice]):
    """The sender's end of one connection. `_reserved` has the slices not released yet, by slot."""

    def __init__(self, name: str, changed: Notifier) -> None:
        """Connect. `changed` wakes callers that wait for memory. Raises OSError without a listener under `name`."""
        self._changed = changed
        self._reserved: dict[int, Slice] = {}
        self._slots = itertools.count()
        self._nonce = b""
        self._max_bytes = -1  # unknown before the Welcome
        self._packets = packets.PacketSocket(packets.connect(name), self._handle, self._end)

    @property
    def closed(self) -> bool:
        return self._packets.closed

    @abstractmethod
    async def shake_hands(self) -> None:
        """Share the arena, and wait until the receiver has read from it. Raises one of the connection's `refusals`."""

    def check_size(self, num_bytes: int) -> None:
        """Raise TriptychError("invalid_request") for a tensor larger than the receiver takes."""
        if num_bytes > self._max_bytes:
            raise TriptychError("invalid_request", f"{num_bytes} bytes; the receiver takes {self._max_bytes} at most")

    async def reserve(self, num_bytes: int) -> Slice:
        """Reserve a slice, as soon as memory is free; callers take turns. Raises OSError if the receiver has gone."""
        while (reserved := self.reserve_now(num_bytes)) is None:
            await self._next_change()
        return reserved

    @abstractmethod
    def reserve_now(self, num_bytes: int) -> Slice | None:
        """Reserve a slice; None if memory is short now, or the receiver has gone."""

    @abstractmethod
    async def write(self, part: Slice, header: TensorHeader, data: Data) -> TensorHeader:
        """Copy a tensor to its slice; return the header with the checksum, if the memory has checksums."""

    @abstractmethod
    async def announce(self, part: Slice, header: TensorHeader) -> None:
        """Announce a tensor that lies in its slice. Raises OSError if the receiver has gone."""

    @abstractmethod
    def release(self, part: Slice) -> None:
        """Release a slice. A closed link has released all slices."""

    def close(self) -> None:
        """Release everything; pending calls raise OSError."""
        self._packets.close()
        for part in list(self._reserved.values()):
            self.release(part)
        self._changed.notify()

    async def _next_change(self) -> None:
        if not self.closed:
            await self._changed.wait()
        if self.closed:
            raise ConnectionResetError("it has closed the connection")

    def _handle(self, packet: memoryview, fds: list[int]) -> None:
        packets.close_all(fds)
        message = for_sender(packet)
        if isinstance(message, Release):
            for slot in message.slots:
                if slot not in self._reserved:
                    raise ValueError(f"slot {slot} is not lent")
                self.release(self._reserved[slot])
            return
        if not self._nonce or message.nonce != self._nonce:
            raise ValueError("the receiver does not see this memory")
        self._max_bytes = message.max_bytes
        self._changed.notify()

    @abstractmethod
    def _end(self, error: Exception | None) -> None:
        """Log the error, if the receiver has broken the protocol, and close."""


L = TypeVar("L", bound=Link[Any, Any])


class LinkedConnection(ABC, Generic[L, Data]):
    """Makes a link with the first send, and another after a break, until closed.

    `refusals` are the errors of an absent receiver, `memory` names the shared memory in messages.
    """

    refusals: ClassVar[tuple[type[Exception], ...]] = (OSError,)
    memory: ClassVar[str]

    def __init__(self, address: str) -> None:
        self._address = address
        self._host, _, self._name = address.partition("://")[2].partition("/")
        self._turn = asyncio.Lock()
        self._num_refused = 0
        self._link: L | None = None
        self._closed = False

    async def send(self, header: TensorHeader, data: Data, timeout_s: float) -> None:
        """See broker.transports.base.Connection."""
        refused_before = self._num_refused
        async with sending(self._address, timeout_s, *self.refusals):
            async with self._turn:
                link = await self._connected(refused_before)
                link.check_size(data.nbytes)
                part = await link.reserve(data.nbytes)
            try:
                await link.announce(part, await link.write(part, header, data))
            except BaseException:
                link.release(part)
                raise

    def close(self) -> None:
        self._closed = True
        if self._link is not None:
            self._link.close()

    async def _connected(self, refused_before: int) -> L:
        """Return the link, new if needed. `refused_before` is `_num_refused` from before the caller's wait.

        Raises Unreachable without shared memory, and TriptychError("unavailable") once the connection is closed.
        """
        if self._closed:  # others may have waited for their turn meanwhile: a new link would be nobody's to close
            raise TriptychError("unavailable", f"the connection to {self._address} is closed")
        if self._link is not None and not self._link.closed:
            return self._link
        if self._num_refused != refused_before:  # each of those that wait would shake hands as long again
            raise Unreachable(f"no {self.memory} with {self._address}: the tensor before has found none")
        if self._host != boot_id():
            raise Unreachable(f"{self._address} is on another host")
        try:
            link = await self._make_link(self._name)
            try:
                async with asyncio.timeout(HANDSHAKE_S):
                    await link.shake_hands()
            except BaseException:
                link.close()
                raise
        except self.refusals as error:  # TimeoutError is an OSError
            self._num_refused += 1
            why = str(error) or f"no answer within {HANDSHAKE_S:g} s"
            raise Unreachable(f"no {self.memory} with {self._address}: {why}") from error
        self._link = link
        return link

    @abstractmethod
    async def _make_link(self, name: str) -> L:
        """Make a link. Raises a `refusals` error without a listener under `name`."""
