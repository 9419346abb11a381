"""What every transport of tensors is: a receiver that others connect to, and one connection per pair of processes.

A transport moves a header and raw bytes. It knows no dtype, looks into no header and computes no checksum: that is
done once for all of them, in broker.tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Final, Protocol

from common.errors import TriptychError
from common.messages import TensorHeader

QUEUE_TENSORS: Final = 64
"""Tensors on their way over one connection; the next one waits for room."""


def _nothing() -> None: ...


@dataclass(frozen=True)
class ReceivedTensor:
    """`data` holds the bytes that came with `header`; it may be read-only and at any address.

    `fault` says why header and bytes do not agree with each other, or were damaged on the way; None if all is well.
    """

    header: TensorHeader
    data: memoryview
    fault: str | None = None
    _release: Callable[[], None] = field(default=_nothing, repr=False, compare=False)

    def release(self) -> None:
        """Say that the bytes have been used: call it once they are in the cache, or were refused.

        Where they lie in memory shared with the sender, their room goes back to it; until then the sender has that
        much less. `data` must not be used afterwards. An array made from it that is still alive keeps the room: it
        goes back when the array does. The same happens, later, where nobody calls this. Safe from any thread, and
        twice.
        """
        try:
            self.data.release()
        except BufferError:  # an array looks at it
            return
        self._release()


class Unreachable(TriptychError):
    """This transport cannot reach that receiver; another one may. Nothing was sent."""

    def __init__(self, message: str) -> None:
        super().__init__("unavailable", message)


def took_none(address: str, timeout_s: float) -> TriptychError:
    """The error of a send whose deadline has passed."""
    return TriptychError("unavailable", f"the receiver of tensors at {address} took none within {timeout_s:g} s")


class Receiver(Protocol):
    """The receiving end: one per process and transport. Made, used and closed on a running loop."""

    address: str
    """A URL under which senders find it."""
    num_invalid: int
    """Messages that were none, and connections dropped for them."""

    async def receive(self) -> ReceivedTensor:
        """The next tensor of any sender, unchecked; what is no tensor at all is counted and dropped."""

    def close(self) -> None:
        """Let go of everything but the tensors received: they stay valid until released. Twice is fine."""


class Connection(Protocol):
    """The sending end of one pair of processes: connects at the first send, stays, and connects again when broken."""

    scheme: ClassVar[str]
    """The beginning of the addresses that it can connect to, up to `://`."""

    async def send(self, header: TensorHeader, data: memoryview, timeout_s: float) -> None:
        """Hand one tensor over; one that never arrives shows by its missing receipt.

        Raises TriptychError("unavailable") where there is no receiver, or no room, within `timeout_s`; Unreachable
        where this transport is the wrong one. A tensor whose sending has failed or was cancelled leaves nothing
        behind.
        """

    def close(self) -> None:
        """Close the connection and give its memory back; what is being sent fails, by its deadline at
        the latest. Twice is fine."""
