"""Messages to the receiver of shared memory, beside the messages of every link (see linked.wire).

sender    Hello (with the arena's descriptor)  -->   receiver
          Announce, one per tensor             -->
          AnnounceBatch, of small tensors      -->

or, where memory is shared before the tensor is computed (see push_buffer):

          PushOffer (with a descriptor)        -->
          Written, during the copy             -->
          Announce, or PushWithdraw            -->
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from broker.transports.linked.wire import NONCE_BYTES, Announce
from common.messages import Count, Decode, TensorHeader, make_decode

SCHEME: Final = "shm+unix"
VERSION: Final = 4
MAX_BATCH: Final = 16
"""Tensors of one AnnounceBatch."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first packet. The arena begins with a random nonce, for the receiver to read."""

    arena_bytes: Annotated[int, msgspec.Meta(ge=NONCE_BYTES)]
    version: int = VERSION


class AnnounceBatch(msgspec.Struct, frozen=True, tag="bundle"):
    """Small tensors of one slot: the first at `offset` in the arena, the others at multiples of ALIGNMENT_BYTES."""

    slot: Count
    offset: Count
    headers: Annotated[list[TensorHeader], msgspec.Meta(min_length=1, max_length=MAX_BATCH)]


class PushOffer(msgspec.Struct, frozen=True, tag="give"):
    """Empty memory for a tensor still being computed, behind this packet's descriptor. `header` has no checksum."""

    slot: Count
    header: TensorHeader


class Written(msgspec.Struct, frozen=True, tag="written"):
    """The first `num_bytes` of the tensor are in the pushed memory; 0 announces the first bytes."""

    slot: Count
    num_bytes: Count


class PushWithdraw(msgspec.Struct, frozen=True, tag="take_back"):
    """No tensor will arrive in the pushed memory."""

    slot: Count


ToReceiver: TypeAlias = Hello | Announce | AnnounceBatch | PushOffer | Written | PushWithdraw
for_receiver: Final[Decode[ToReceiver]] = make_decode(ToReceiver)
