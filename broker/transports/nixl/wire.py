"""What the two ends of NIXL say to each other over ZMQ, beside the bytes.

sender    Greeting, once                 -->   (reads the nonce)
          <--  Welcome                        receiver; or Refusal
          Piece, of at most PIECE_BYTES  -->   (reads it from the sender's memory)
          <--  Taken, one per Piece
          Complete, per tensor of a GPU  -->   (hands it out)

The bytes of a GPU have no checksum. So the sender has the last word on them: while it has not given a tensor up, its
pieces are what has been read. Whoever reads later, when their room has been given to another one, never gets that word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final, TypeAlias

import msgspec

from broker.transports.nixl.registered_buffer import Kind
from broker.transports.wire import make_decode
from common.messages import Count, TensorHeader, encode

VERSION: Final = 1
PIECE_BYTES: Final = 8 * 2**20
WINDOW: Final = 4
"""Pieces in the sender's memory at a time."""
MAX_MESSAGE_BYTES: Final = 256 * 2**10
NONCE_BYTES: Final = 16
_Address = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Greeting(msgspec.Struct, frozen=True, tag="greeting"):
    """The metadata of the sender's agent, its memory among it: of the host, or of its GPU number `device`.

    A random nonce, which the receiver has to read, lies at `nonce_address`; none where that is 0.
    """

    metadata: bytes
    version: int = VERSION
    kind: Kind = "DRAM"
    device: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    nonce_address: _Address = 0


class ReceiverGreeting(msgspec.Struct, frozen=True, tag="welcome"):
    """The receiver knows the sender, and has read its nonce. No tensor may have more than `max_bytes`."""

    max_bytes: Count
    nonce: bytes = b""


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """The receiver has not read the nonce, for `fault`, or will not read anything from anybody, `for_good`."""

    fault: str
    for_good: bool = False


class ReadablePiece(msgspec.Struct, frozen=True, tag="piece"):
    """Bytes from `start` on of tensor `number`, which has `size_bytes`; they lie at `address` of the sender."""

    number: Count
    header: TensorHeader
    size_bytes: Count
    start: Count
    num_bytes: Annotated[int, msgspec.Meta(ge=0, le=PIECE_BYTES)]
    address: _Address

    @property
    def ends(self) -> int:
        """The first byte of the tensor behind it."""
        return self.start + self.num_bytes


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """The receiver has read a piece of tensor `number`; or `fault` says why it takes none of it."""

    number: Count
    fault: str = ""


class Complete(msgspec.Struct, frozen=True, tag="complete"):
    """All pieces of tensor `number` have been taken, and were its own until then."""

    number: Count


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """The sender will send nothing more."""


ToReceiver: TypeAlias = Greeting | ReadablePiece | Complete | Goodbye
ToSender: TypeAlias = ReceiverGreeting | Refusal | Taken
for_receiver: Final[Callable[[bytes | memoryview], ToReceiver]] = make_decode(ToReceiver)
for_sender: Final[Callable[[bytes | memoryview], ToSender]] = make_decode(ToSender)


def pack(message: ToReceiver | ToSender) -> bytes:
    return encode(message)
