"""Messages between the two ends of shared memory, over their Unix socket.

sender    Hello (with the arena's descriptor)  -->
          <--  Welcome                                 receiver
          Announce, one per tensor             -->
          Bundle, of small tensors             -->
          <--  Release, of one slot or a few

or, where the tensor is made in time for it (see given):

          Give (with a descriptor)             -->
          Written, while it is copied          -->
          Announce, or TakeBack                -->
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final, TypeAlias

import msgspec

from broker.transports.base import QUEUE_TENSORS
from broker.transports.wire import make_decode
from common.messages import Count, TensorHeader, encode

VERSION: Final = 4
NONCE_BYTES: Final = 16
MAX_BUNDLED: Final = 16
"""Tensors of one Bundle."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first packet. The arena begins with a random nonce, for the receiver to read."""

    arena_bytes: Annotated[int, msgspec.Meta(ge=NONCE_BYTES)]
    version: int = VERSION


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The arena is mapped: `nonce` was read from it. No tensor may have more than `max_bytes`."""

    nonce: bytes
    max_bytes: Count


class Announce(msgspec.Struct, frozen=True, tag="announce"):
    """A tensor lies at `offset`: in the arena, or behind this packet's descriptor, or in the memory given under this
    slot. Given memory is now the receiver's own, and never released."""

    slot: Count
    offset: Count
    size_bytes: Count
    header: TensorHeader


class Bundle(msgspec.Struct, frozen=True, tag="bundle"):
    """Small tensors lie in the arena one behind the other: the first at `offset`, the others at multiples of
    ALIGNMENT_BYTES. The slot is released after all its tensors."""

    slot: Count
    offset: Count
    headers: Annotated[list[TensorHeader], msgspec.Meta(min_length=1, max_length=MAX_BUNDLED)]


class Release(msgspec.Struct, frozen=True, tag="release"):
    """The receiver has no more use for the tensors of these slots."""

    slots: Annotated[list[Count], msgspec.Meta(max_length=QUEUE_TENSORS)]


class Give(msgspec.Struct, frozen=True, tag="give"):
    """Memory for a tensor still being computed, behind this packet's descriptor; still empty.

    The header is without its checksum.
    """

    slot: Count
    header: TensorHeader


class Written(msgspec.Struct, frozen=True, tag="written"):
    """The first `num_bytes` of the tensor are in the given memory; 0 announces the first bytes."""

    slot: Count
    num_bytes: Count


class TakeBack(msgspec.Struct, frozen=True, tag="take_back"):
    """No tensor will arrive in the given memory."""

    slot: Count


ToReceiver: TypeAlias = Hello | Announce | Bundle | Give | Written | TakeBack
ToSender: TypeAlias = Welcome | Release
for_receiver: Final[Callable[[bytes | memoryview], ToReceiver]] = make_decode(ToReceiver)
for_sender: Final[Callable[[bytes | memoryview], ToSender]] = make_decode(ToSender)


def pack(message: ToReceiver | ToSender) -> bytes:
    return encode(message)
