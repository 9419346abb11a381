"""Messages between the two ends of a GPU's memory, over their Unix socket.

sender    Hello (with the arena's handle)  -->
          <--  Welcome                           receiver
          Announce, one per tensor         -->   (copies it out of the arena)
          <--  Release, of one tensor or a few

All but the greeting is as on every link: see linked.wire.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from broker.transports.cuda.runtime import HANDLE_BYTES
from broker.transports.linked.wire import NONCE_BYTES, Announce
from common.messages import Count, Decode, make_decode

VERSION: Final = 2


class ArenaHello(msgspec.Struct, frozen=True, tag="hello"):
    """The first packet: the handle of the sender's arena on GPU `device_id`, with a random nonce at `nonce_offset`."""

    handle: Annotated[bytes, msgspec.Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]
    arena_bytes: Annotated[int, msgspec.Meta(ge=NONCE_BYTES)]
    nonce_offset: Count
    device_id: Annotated[str, msgspec.Meta(max_length=64)]
    version: int = VERSION


ToReceiver: TypeAlias = ArenaHello | Announce
for_receiver: Final[Decode[ToReceiver]] = make_decode(ToReceiver)
