"""KV on the wire: the size of parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from broker.transports.tensors import ITEM_BYTES

PART_BYTES: Final = 8 * 2**20
"""A part is not larger, unless a single token is."""


def tokens_per_part(token_shape: Sequence[int], dtype: str) -> int:
    """Return the number of tokens of a shape in one part."""
    return max(1, PART_BYTES // max(1, math.prod(token_shape) * ITEM_BYTES[dtype]))
