"""Bound on bodies in many tiny chunks: parsing a tiny chunk costs as much as parsing a large chunk."""

from __future__ import annotations

from typing import Final

CHUNK_COST_BYTES: Final = 64
"""Charge per chunk, in bytes of data."""
SPARE_BYTES: Final = 1000 * CHUNK_COST_BYTES
"""Credit of a body: about a thousand chunks may be tiny, however large the earlier chunks were."""


class ChunkGuard:
    """Balance of one body."""

    def __init__(self) -> None:
        self._spare = SPARE_BYTES

    def are_too_many(self, num_bytes: int, *, begins: bool = True) -> bool:
        """Count `num_bytes` of a chunk, a new chunk if `begins`. Return whether the credit is used up."""
        self._spare = min(SPARE_BYTES, self._spare + num_bytes - begins * CHUNK_COST_BYTES)
        return self._spare < 0
