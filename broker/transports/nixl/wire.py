"""Messages between the two ends of NIXL, over ZMQ, beside the bytes.

sender    Greeting, once                 -->   (reads the nonce)
          <--  Welcome                        receiver; or Refusal
          Piece, of at most PIECE_BYTES  -->   (reads it from the sender's memory)
          <--  Taken, one per Piece
          Complete, per tensor of a GPU  -->   (hands the tensor out)

The bytes of a GPU have no checksum, so the sender has the last word. A receiver may read an abandoned tensor after the
memory has another: without `Complete` for the abandoned tensor, it hands out nothing.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from common.messages import Count, Decode, TensorHeader, make_decode

Kind: TypeAlias = Literal["DRAM", "VRAM"]
"""NIXL's names for memory of the host and of a GPU."""
Where: TypeAlias = tuple[Kind, int]
"""The kind of memory, and the number of the device."""
HOST: Final[Where] = ("DRAM", 0)

VERSION: Final = 1
PIECE_BYTES: Final = 8 * 2**20
WINDOW: Final = 4
"""Pieces in the sender's memory at a time."""
MAX_MESSAGE_BYTES: Final = 256 * 2**10
NONCE_BYTES: Final = 16
NONCE_S: Final = 5.0
"""Longest wait for a nonce to be read; the sender chooses another transport then."""
FORGET_S: Final = 60.0
"""After so long a silence a sender has to greet again; longer where a piece may take longer."""
_Address = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Greeting(msgspec.Struct, frozen=True, tag="greeting"):
    """Metadata of the sender's agent and of its memory: of the host, or of the sender's GPU number `device`.

    A random nonce, which the receiver has to read, lies at `nonce_address`; 0 stands for no nonce.
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
    """The receiver has not read the nonce, for `fault`; `for_good` means that it reads from no sender at all."""

    fault: str
    for_good: bool = False


class ReadablePiece(msgspec.Struct, frozen=True, tag="piece"):
    """Bytes from `start` on of tensor `number`, a tensor of `size_bytes`; they lie at `address` of the sender."""

    number: Count
    header: TensorHeader
    size_bytes: Count
    start: Count
    num_bytes: Annotated[int, msgspec.Meta(ge=0, le=PIECE_BYTES)]
    address: _Address

    @property
    def ends(self) -> int:
        """The tensor's first byte behind the piece."""
        return self.start + self.num_bytes


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """The receiver has read a piece of tensor `number`; or `fault` says why it reads none of the tensor."""

    number: Count
    fault: str = ""


class Complete(msgspec.Struct, frozen=True, tag="complete"):
    """The receiver has read all pieces of tensor `number`, and their memory held no other tensor until then."""

    number: Count


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """The sender will send no further message."""


ToReceiver: TypeAlias = Greeting | ReadablePiece | Complete | Goodbye
ToSender: TypeAlias = ReceiverGreeting | Refusal | Taken
for_receiver: Final[Decode[ToReceiver]] = make_decode(ToReceiver)
for_sender: Final[Decode[ToSender]] = make_decode(ToSender)
