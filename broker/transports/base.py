"""The interface of every tensor transport: a receiver, and one connection per pair of processes.

A transport moves a header and raw bytes, and writes only the header's checksum. The common part of all transports is in
broker.transports.tensors. The bytes of a GPU have no checksum, for no processor sees them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import ClassVar, Final, Protocol, TypeAlias, TypeVar

from broker.transports.received import Received
from common.errors import TriptychError
from common.messages import TensorHeader

QUEUE_TENSORS: Final = 64
"""Tensors on their way over one connection; the next tensor waits for a slot."""


class Unreachable(TriptychError):
    """Raised before any byte was sent, if this transport cannot reach the receiver; another may."""

    def __init__(self, message: str) -> None:
        super().__init__("unavailable", message)


@asynccontextmanager
async def sending(address: str, timeout_s: float, *faults: type[Exception]) -> AsyncIterator[None]:
    """Limit a send to `timeout_s`. Raise TriptychError("unavailable") for a late send, and for one of `faults`."""
    receiver = f"the receiver of tensors at {address}"
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise TriptychError("unavailable", f"{receiver} took none within {timeout_s:g} s") from error
    except faults as error:
        raise TriptychError("unavailable", f"{receiver}: {error}") from error


class Receiver(Protocol):
    """The receiving end: one per process and transport. Made, used and closed on a running loop.

    After `pop` has returned None, the `on_arrival` of the constructor is called with this receiver as soon as a tensor
    may be there again.
    """

    address: str
    """A URL under which senders find it."""
    num_invalid: int
    """Invalid messages, and connections dropped for such messages."""

    @property
    def num_unfinished(self) -> int:
        """Tensors discarded before their end: abandoned, too slow, unreadable. Broken ones count in `num_invalid`."""

    def pop(self) -> Received | None:
        """Return the next tensor of any sender, unchecked, or memory for a later tensor; None if nothing waits.

        Invalid messages are counted and dropped. Unread tensors wait, and beyond a bound their senders wait, too.
        """

    def close(self) -> None:
        """Release everything but received tensors, valid until their release. Idempotent."""


OnArrival: TypeAlias = Callable[[Receiver], None]
Sent = TypeVar("Sent", contravariant=True)
"""memoryview, or DeviceBuffer for the memory of a GPU."""


class Connection(Protocol[Sent]):
    """The sending end of one pair of processes: connects with the first send, and again after a break."""

    scheme: ClassVar[str]
    """The beginning of reachable addresses, up to `://`."""

    async def send(self, header: TensorHeader, data: Sent, timeout_s: float) -> None:
        """Hand a tensor over, with its checksum in the header; a lost tensor shows by its missing receipt.

        `data` must not change until the receipt has come. A failed or cancelled send leaves nothing behind.

        Raises TriptychError("unavailable") without a receiver, or without memory there, within `timeout_s`; Unreachable
        if this transport is the wrong one.
        """

    def close(self) -> None:
        """Close the connection and free the memory; pending sends fail, by their deadline at the latest. Idempotent."""
