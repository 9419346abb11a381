"""Block tables over one pool: a self-attention table per request, a cross-attention table per request.

A block belongs to one table. Self tables grow with the tokens; cross tables are as long as the encoder's output
and read-only once written. Both index the same per-layer KV tensors, so one budget holds for both.
"""

from __future__ import annotations

from engine.cache.block_pool import BlockPool, IntegrityError


class BlockManager:
    """Who owns which blocks. Lengths are in tokens."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self._self_tables: dict[str, list[int]] = {}
        self._cross_tables: dict[str, list[int]] = {}

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def fits_ever(self, num_tokens: int, num_encoder_tokens: int = 0) -> bool:
        """False for a request that could not run even with the whole pool to itself."""
        return self.blocks_for(num_tokens) + self.blocks_for(num_encoder_tokens) <= self.pool.num_usable

    def can_allocate(self, num_tokens: int, num_encoder_tokens: int = 0) -> bool:
        return self.pool.can_allocate(self.blocks_for(num_tokens) + self.blocks_for(num_encoder_tokens))

    def allocate(self, request_id: str, num_tokens: int, num_encoder_tokens: int = 0) -> None:
        """Make the tables of a request that has none."""
        if request_id in self._self_tables:
            raise IntegrityError(f"request {request_id} has block tables already")
        if num_encoder_tokens:
            self._cross_tables[request_id] = self.pool.allocate_run(self.blocks_for(num_encoder_tokens))
        self._self_tables[request_id] = self.pool.allocate(self.blocks_for(num_tokens))

    def can_append(self, request_id: str, num_tokens: int) -> bool:
        """Whether the self table can grow to hold `num_tokens` in all."""
        missing = self.blocks_for(num_tokens) - len(self._self_tables[request_id])
        return missing <= 0 or self.pool.can_allocate(missing)

    def append(self, request_id: str, num_tokens: int) -> None:
        """Grow the self table to hold `num_tokens` in all."""
        table = self._self_tables[request_id]
        missing = self.blocks_for(num_tokens) - len(table)
        if missing > 0:
            table.extend(self.pool.allocate(missing))

    def get_block_table(self, request_id: str) -> list[int]:
        return self._self_tables[request_id]

    def get_cross_block_table(self, request_id: str) -> list[int]:
        return self._cross_tables.get(request_id, [])

    def num_blocks(self, request_id: str) -> int:
        """Blocks that a request holds, both tables."""
        return len(self._self_tables.get(request_id, [])) + len(self._cross_tables.get(request_id, []))

    def free(self, request_id: str) -> None:
        """Free both tables of a request; nothing happens where it has none."""
        for tables in (self._self_tables, self._cross_tables):
            self.pool.free(tables.pop(request_id, []))

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the tables hold exactly the used blocks, each once."""
        self.pool.check_integrity()
        owned = [block for tables in (self._self_tables, self._cross_tables) for t in tables.values() for block in t]
        if len(owned) != len(set(owned)) or len(owned) != self.pool.num_used:
            raise IntegrityError(
                f"tables hold {len(owned)} blocks ({len(set(owned))} distinct), {self.pool.num_used} used"
            )
