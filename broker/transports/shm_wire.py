"""What the two ends of shared memory say to each other over their Unix socket.

sender    Hello (with the arena's descriptor)  -->
          <--  Welcome                                 receiver
          Announce, one per tensor             -->
          <--  Release, one per tensor
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from common.messages import Count, TensorHeader, encode

VERSION: Final = 1
NONCE_BYTES: Final = 16


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first packet. The arena begins with a random nonce, which the receiver has to read there."""

    arena_bytes: Annotated[int, msgspec.Meta(ge=NONCE_BYTES)]
    version: int = VERSION


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The arena is mapped: `nonce` was read from it. No tensor may have more than `max_bytes`."""

    nonce: bytes
    max_bytes: Count


class Announce(msgspec.Struct, frozen=True, tag="announce"):
    """A tensor lies at `offset`, in the arena, or in the memory whose descriptor comes with this packet."""

    slot: Count
    offset: Count
    size_bytes: Count
    header: TensorHeader


class Release(msgspec.Struct, frozen=True, tag="release"):
    """The receiver has no more use for the tensor of an Announce."""

    slot: Count


ToReceiver: TypeAlias = Hello | Announce
ToSender: TypeAlias = Welcome | Release
_to_receiver: msgspec.msgpack.Decoder[ToReceiver] = msgspec.msgpack.Decoder(ToReceiver)
_to_sender: msgspec.msgpack.Decoder[ToSender] = msgspec.msgpack.Decoder(ToSender)


def pack(message: ToReceiver | ToSender) -> bytes:
    return encode(message)


def for_receiver(packet: bytes | memoryview) -> ToReceiver:
    """Raises ValueError on anything else."""
    return _to_receiver.decode(packet)


def for_sender(packet: bytes | memoryview) -> ToSender:
    """Raises ValueError on anything else."""
    return _to_sender.decode(packet)
