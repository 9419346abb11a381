"""What the two ends of NIXL say to each other over ZMQ, beside the bytes.

sender    Greeting, once                 -->
          <--  Welcome                        receiver
          Piece, of at most PIECE_BYTES  -->  (reads it from the sender's memory)
          <--  Taken, one per Piece
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final, TypeAlias

import msgspec

from broker.transports.wire import make_decode
from common.messages import Count, TensorHeader, encode

VERSION: Final = 1
PIECE_BYTES: Final = 8 * 2**20
WINDOW: Final = 4
"""Pieces in the sender's memory at a time."""
MAX_MESSAGE_BYTES: Final = 256 * 2**10
_Address = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Greeting(msgspec.Struct, frozen=True, tag="greeting"):
    """The metadata of the sender's agent, its memory among it."""

    metadata: bytes
    version: int = VERSION


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The receiver knows the sender. No tensor may have more than `max_bytes`."""

    max_bytes: Count


class Piece(msgspec.Struct, frozen=True, tag="piece"):
    """Bytes from `start` on of tensor `number`, which has `size_bytes`; they lie at `address` of the sender."""

    number: Count
    header: TensorHeader
    size_bytes: Count
    start: Count
    num_bytes: Annotated[int, msgspec.Meta(ge=0, le=PIECE_BYTES)]
    address: _Address


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """The receiver has read a piece of tensor `number`; or `fault` says why it takes none of it."""

    number: Count
    fault: str = ""


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """The sender will send nothing more."""


ToReceiver: TypeAlias = Greeting | Piece | Goodbye
ToSender: TypeAlias = Welcome | Taken
for_receiver: Final[Callable[[bytes | memoryview], ToReceiver]] = make_decode(ToReceiver)
for_sender: Final[Callable[[bytes | memoryview], ToSender]] = make_decode(ToSender)


def pack(message: ToReceiver | ToSender) -> bytes:
    return encode(message)
