"""A link over a Unix socket, at the sender: the common part of shm and cuda."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import ClassVar, Final, Generic, Protocol, TypeVar

from broker.transports.base import Unreachable
from common.errors import TriptychError

HANDSHAKE_S: Final = 2.0


def boot_id() -> str:
    """Return the id of this running kernel: equal for two processes on the same host."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


class Link(Protocol):
    """The sender's end of one connection."""

    @property
    def closed(self) -> bool: ...

    def close(self) -> None: ...


L = TypeVar("L", bound=Link)


class LinkedConnection(ABC, Generic[L]):
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

    def close(self) -> None:
        self._closed = True
        if self._link is not None:
            self._link.close()

    async def _connected(self, refused_before: int) -> L:
        """Return the link, new if needed. `refused_before` is `_num_refused` from before the caller's wait for its
        turn.

        Raises Unreachable if the receiver is on another host or does not see the shared memory, and
        TriptychError("unavailable") once the connection is closed.
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
                    await self._shake_hands(link)
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

    @abstractmethod
    async def _shake_hands(self, link: L) -> None:
        """Share the memory and wait until the receiver has read from the memory. Raises a `refusals` error on
        failure."""
