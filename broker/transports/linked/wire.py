"""Messages of every link over a Unix socket, and the messages to the sender.

sender    Hello, with an arena          -->
          <--  Welcome                       receiver
          Announce, one per tensor      -->
          <--  Release, of one slot or a few
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from broker.transports.base import QUEUE_TENSORS
from common.messages import Count, Decode, TensorHeader, make_decode

NONCE_BYTES: Final = 16


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The arena is mapped: `nonce` was read from it. No tensor may have more than `max_bytes`."""

    nonce: bytes
    max_bytes: Count


class Announce(msgspec.Struct, frozen=True, tag="announce"):
    """A tensor lies at `offset`: in the arena, or behind this packet's descriptor, or in the memory pushed under this
    slot. Pushed memory is now the receiver's own, and never released."""

    slot: Count
    offset: Count
    size_bytes: Count
    header: TensorHeader


class Release(msgspec.Struct, frozen=True, tag="release"):
    """The receiver has no more use for the tensors of these slots."""

    slots: Annotated[list[Count], msgspec.Meta(max_length=QUEUE_TENSORS)]


ToSender: TypeAlias = Welcome | Release
for_sender: Final[Decode[ToSender]] = make_decode(ToSender)
