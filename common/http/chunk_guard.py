"""A bound on data that come in many tiny pieces, each of which costs whoever parses it as much as a large one."""

from __future__ import annotations

from typing import Final

PIECE_COST_BYTES: Final = 64
"""A piece costs as if it had so much less data."""
SPARE_BYTES: Final = 1000 * PIECE_COST_BYTES
"""What pieces may cost beyond what they bring: some thousand may be tiny, however large those before them were."""


class ChunkGuard:
    """Counts the pieces of one body."""

    def __init__(self) -> None:
        self._spare = SPARE_BYTES

    def are_too_many(self, num_bytes: int, *, begins: bool = True) -> bool:
        """Count `num_bytes` more, the beginning of a piece or more of the same one: whether it is too much by now."""
        self._spare = min(SPARE_BYTES, self._spare + num_bytes - begins * PIECE_COST_BYTES)
        return self._spare < 0
