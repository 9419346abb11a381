"""What every transport of tensors is: a receiver that others connect to, and one connection per pair of processes.

A transport moves a header and raw bytes. It knows no dtype and looks into no header; it writes one field of it, the
checksum, for it makes the last pass over the bytes anyway. ZMQ, which divides what is large, asks the header whether
that is keys and values. What is common to all of them is in broker.transports.tensors.

One of them moves the memory of a GPU (`cuda`). No processor sees those bytes: they have no checksum, and are copied by
whoever knows the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Final, Protocol, TypeVar

import msgspec

from broker.transports import checksums
from broker.transports.chunked_bytes import ChunkedBytes
from broker.transports.payload import DeviceBuffer, Payload
from common.errors import TriptychError
from common.messages import TensorHeader

QUEUE_TENSORS: Final = 64
"""Tensors on their way over one connection; the next one waits for room."""


def _nothing() -> None: ...


class ReceivedTensor(msgspec.Struct, frozen=True, eq=False):
    """`data` holds the bytes that came with `header`; it may be read-only, at any address, in pieces, and on a GPU.

    `fault` says why the header does not agree with itself or with the number of bytes; None if it does. Whether the
    bytes are those that were sent is only known after one pass over them: either by `verify` or by `copy_into`.
    Over pieces it has been made when they came.
    """

    header: TensorHeader
    data: Payload | ChunkedBytes
    fault: str | None = None
    _release: Callable[[], None] = _nothing

    async def verify(self) -> str | None:
        """Why the bytes must not be used; None where they are undamaged, as they lie in `data`, or on a GPU."""
        if self.fault is not None or isinstance(self.data, DeviceBuffer):
            return self.fault
        if isinstance(self.data, ChunkedBytes):
            return self._fault_of(self.data.checksum)
        return self._fault_of(await checksums.checksum_of(self.data))

    async def copy_into(self, target: memoryview) -> str | None:
        """Copy the bytes, and look at what has been written: None where it is undamaged.

        Else the return value says why not, and nobody may look at `target`, which holds bytes of the same number.
        Raises TypeError for the memory of a GPU.
        """
        if self.fault is not None:
            return self.fault
        if isinstance(self.data, DeviceBuffer):
            raise TypeError("memory of a GPU is copied by CUDA")
        if isinstance(self.data, memoryview):
            return self._fault_of(await checksums.copy(self.data, target, hashed=target))
        fault = await self.verify()
        if fault is None:
            await checksums.join(self.data, target)
        return fault

    def _fault_of(self, checksum: int) -> str | None:
        if checksum == self.header.checksum:
            return None
        return "the checksum is not the one of these bytes: they were damaged on the way"

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
    """The receiving end: one per process and transport. Made, used and closed on a running loop.

    It calls the `on_arrival` that it was made with when there may be a tensor again after `take` has found none.
    """

    address: str
    """A URL under which senders find it."""
    num_invalid: int
    """Messages that were none, and connections dropped for them."""

    @property
    def num_unfinished(self) -> int:
        """Tensors that began to come and were dropped before their end: given up, too slow, unreadable. Those that were
        broken are among `num_invalid`."""

    def take(self) -> ReceivedTensor | None:
        """The next tensor of any sender, unchecked; None where there is none at the moment.

        What is no tensor at all is counted and dropped. What is not taken waits, and its senders do when it is much.
        """

    def close(self) -> None:
        """Let go of everything but the tensors received: they stay valid until released. Twice is fine."""


Sent = TypeVar("Sent", contravariant=True)
"""memoryview, or DeviceBuffer for the memory of a GPU."""


class Connection(Protocol[Sent]):
    """The sending end of one pair of processes: connects at the first send, stays, and connects again when broken."""

    scheme: ClassVar[str]
    """The beginning of the addresses that it can connect to, up to `://`."""

    async def send(self, header: TensorHeader, data: Sent, timeout_s: float) -> None:
        """Hand one tensor over, with its checksum in the header; one that never arrives shows by its missing receipt.

        `data` are bytes, in one piece, which must not change until the receipt has come. A tensor whose sending has
        failed or was cancelled leaves nothing behind.

        Raises TriptychError("unavailable") where there is no receiver, or no room, within `timeout_s`; Unreachable
        where this transport is the wrong one.
        """

    def close(self) -> None:
        """Close the connection and give its memory back; what is being sent fails, by its deadline at
        the latest. Twice is fine."""
