"""The first of the two frames of every message over ZMQ; the second frame has the bytes.

    TensorHeader    a tensor that is not divided
    First, Next...  one that is, piece by piece; nothing else of this sender comes in between

Every piece has PIECE_BYTES, but the last. An abandoned tensor ends with the beginning of another tensor. No sender can
make the receiver allocate a large tensor at once.
"""

from __future__ import annotations

from typing import Final

import msgspec

from common.messages import Count, Decode, Digest, TensorHeader, make_decode

PIECE_BYTES: Final = 2 * 2**20
"""With 1 MiB the cost per message shows; with 4 MiB and more, a thread waits for another thread's pass."""
WHOLE_BYTES: Final = 8 * 2**20
"""KV up to this size is not divided: KV is wanted in one piece, and joining pieces would be one more copy."""
MAX_HEAD_BYTES: Final = 64 * 2**10
"""Of a first frame."""


class First(msgspec.Struct, frozen=True, tag="first"):
    """The first piece of a tensor of `size_bytes`. The checksum in `header` has no meaning yet."""

    header: TensorHeader
    size_bytes: Count


class Next(msgspec.Struct, frozen=True, tag="next"):
    """The piece from byte `start` on. The last piece carries the `checksum` of the whole tensor."""

    start: Count
    checksum: Digest = 0


Head = TensorHeader | First | Next
_decode: Final[Decode[Head]] = make_decode(Head)


def is_divided(header: TensorHeader, num_bytes: int) -> bool:
    """Whether a tensor goes in several pieces."""
    return num_bytes > (WHOLE_BYTES if header.table else PIECE_BYTES)


def decode_head(data: bytes) -> Head:
    """Decode a first frame. Raises ValueError for invalid bytes."""
    if len(data) > MAX_HEAD_BYTES:
        raise ValueError(f"a head of {len(data)} bytes, {MAX_HEAD_BYTES} is the most")
    return _decode(data)
