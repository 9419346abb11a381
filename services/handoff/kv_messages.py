"""KV on the wire: checks of parts, and the size of parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from broker.transports.tensors import ITEM_BYTES
from common.messages import KvOffer, TensorHeader

PART_BYTES: Final = 8 * 2**20
"""A part is not larger, unless a single token is."""


def tokens_per_part(token_shape: Sequence[int], dtype: str) -> int:
    """Return the number of tokens of a shape in one part."""
    return max(1, PART_BYTES // max(1, math.prod(token_shape) * ITEM_BYTES[dtype]))


def part_fault(header: TensorHeader, offer: KvOffer) -> str | None:
    """Return the mismatch between a part's header and its offer; None for a correct part."""
    if header.table == "self":
        token_shape, num_tokens = offer.token_shape, offer.num_tokens
    elif header.table == "cross":
        token_shape, num_tokens = offer.cross_shape, offer.num_encoder_tokens
    else:
        return f"table {header.table!r} is neither self nor cross"
    if not token_shape or header.dtype != offer.dtype or header.shape[1:] != token_shape:
        return f"offered tokens of {token_shape} {offer.dtype}, came {header.shape} {header.dtype}"
    if header.first + header.shape[0] > num_tokens:
        return f"tokens {header.first} to {header.first + header.shape[0]} of {num_tokens}"
    return None
