"""Block tables over one pool: a self-attention table per request, a cross-attention table per encoder input.

    request a ── self table ── [ 7 ][ 9 ]
              └─ cross table ┐
    request b ── cross table ┴─ [ 2 ][ 3 ][ 4 ]      one copy per content, however many requests read it
              └─ self table ── [ 5 ]

Self tables grow with the tokens and have one owner. Cross tables are as long as the encoder's output, read-only once
written, known by content hash and reference counted. One that nobody reads stays until its blocks are needed: the next
request over the same audio finds its keys and values projected. Both kinds index the same per-layer KV tensors, so one
budget holds for both.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from engine.cache.block_pool import BlockPool, IntegrityError


@dataclass
class _CrossTable:
    blocks: list[int]
    readers: set[str] = field(default_factory=set)
    written: bool = False


class BlockManager:
    """Who owns which blocks. Lengths are in tokens."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.cross_hits = 0
        self._self_tables: dict[str, list[int]] = {}
        self._cross_tables: dict[str, _CrossTable] = {}  # by content hash
        self._cross_of: dict[str, str] = {}  # request id -> content hash
        self._unread: OrderedDict[str, None] = OrderedDict()  # written, nobody reads them; least recently used first
        self._num_unread_blocks = 0

    # --- how much there is

    @property
    def num_free(self) -> int:
        """Blocks that can be had: free ones, and those of cross tables that nobody reads."""
        return self.pool.num_free + self._num_unread_blocks

    @property
    def num_used(self) -> int:
        return self.pool.num_used - self._num_unread_blocks

    @property
    def num_cached(self) -> int:
        """Blocks of cross tables that nobody reads, kept for the next request over the same content."""
        return self._num_unread_blocks

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def fits_ever(self, num_tokens: int, num_encoder_tokens: int = 0) -> bool:
        """False for a request that could not run even with the whole pool to itself."""
        return self.blocks_for(num_tokens) + self.blocks_for(num_encoder_tokens) <= self.pool.num_usable

    def missing_blocks(self, num_tokens: int, num_encoder_tokens: int = 0, content_hash: str = "") -> int:
        """Blocks that `allocate` would take away from `num_free`."""
        entry = self._cross_tables.get(content_hash)
        if entry is None:
            return self.blocks_for(num_tokens) + self.blocks_for(num_encoder_tokens)
        return self.blocks_for(num_tokens) + (0 if entry.readers else len(entry.blocks))

    def can_allocate(self, num_tokens: int, num_encoder_tokens: int = 0, content_hash: str = "") -> bool:
        return self.missing_blocks(num_tokens, num_encoder_tokens, content_hash) <= self.num_free

    # --- allocate, append, free

    def allocate(self, request_id: str, num_tokens: int, num_encoder_tokens: int = 0, content_hash: str = "") -> None:
        """Make the tables of a request that has none; a cross table of the same content is shared.

        `content_hash` tells encoder outputs apart; requests without encoder tokens need none.
        """
        if request_id in self._self_tables:
            raise IntegrityError(f"request {request_id} has block tables already")
        if num_encoder_tokens:
            self._read_cross(request_id, content_hash, num_encoder_tokens)
        self._self_tables[request_id] = self._take(self.blocks_for(num_tokens))

    def _read_cross(self, request_id: str, content_hash: str, num_encoder_tokens: int) -> None:
        entry = self._cross_tables.get(content_hash)
        if entry is None:
            self._make_free(self.blocks_for(num_encoder_tokens))
            entry = _CrossTable(self.pool.allocate_run(self.blocks_for(num_encoder_tokens)))
            self._cross_tables[content_hash] = entry
        else:
            self.cross_hits += 1
            if not entry.readers:
                del self._unread[content_hash]
                self._num_unread_blocks -= len(entry.blocks)
        entry.readers.add(request_id)
        self._cross_of[request_id] = content_hash

    def can_append(self, request_id: str, num_tokens: int) -> bool:
        """Whether the self table can grow to hold `num_tokens` in all."""
        return self.blocks_for(num_tokens) - len(self._self_tables[request_id]) <= self.num_free

    def append(self, request_id: str, num_tokens: int) -> None:
        """Grow the self table to hold `num_tokens` in all."""
        table = self._self_tables[request_id]
        missing = self.blocks_for(num_tokens) - len(table)
        if missing > 0:
            table.extend(self._take(missing))

    def get_block_table(self, request_id: str) -> list[int]:
        return self._self_tables[request_id]

    def get_cross_block_table(self, request_id: str) -> list[int]:
        content_hash = self._cross_of.get(request_id)
        return [] if content_hash is None else self._cross_tables[content_hash].blocks

    def needs_writing(self, request_id: str) -> bool:
        """True for the first reader of a cross table, until `mark_written`."""
        content_hash = self._cross_of.get(request_id)
        return content_hash is not None and not self._cross_tables[content_hash].written

    def mark_written(self, request_id: str) -> None:
        """The keys and values of the request's cross table are in their blocks now."""
        self._cross_tables[self._cross_of[request_id]].written = True

    def releasable_blocks(self, request_id: str) -> int:
        """Blocks that `free` would add to `num_free`."""
        content_hash = self._cross_of.get(request_id)
        cross = self._cross_tables[content_hash] if content_hash is not None else None
        alone = cross is not None and cross.readers == {request_id}
        return len(self._self_tables.get(request_id, [])) + (len(cross.blocks) if cross is not None and alone else 0)

    def free(self, request_id: str) -> None:
        """Free the self table of a request and let go of its cross table; nothing happens where it has none."""
        self.pool.free(self._self_tables.pop(request_id, []))
        self.free_cross(request_id)

    def free_cross(self, request_id: str) -> None:
        """Stop reading the cross table. The last reader leaves a written one behind, for the next request."""
        content_hash = self._cross_of.pop(request_id, None)
        if content_hash is None:
            return
        entry = self._cross_tables[content_hash]
        entry.readers.remove(request_id)
        if entry.readers:
            return
        if entry.written:
            self._unread[content_hash] = None
            self._num_unread_blocks += len(entry.blocks)
        else:
            self.pool.free(self._cross_tables.pop(content_hash).blocks)

    def reset(self) -> None:
        """Free everything."""
        for request_id in list(self._self_tables):
            self.free(request_id)
        self._make_free(self.pool.num_usable)

    def _take(self, count: int) -> list[int]:
        self._make_free(count)
        return self.pool.allocate(count)

    def _make_free(self, count: int) -> None:
        """Give up cross tables that nobody reads, least recently used first, until `count` blocks are free."""
        while self.pool.num_free < count and self._unread:
            content_hash, _ = self._unread.popitem(last=False)
            blocks = self._cross_tables.pop(content_hash).blocks
            self._num_unread_blocks -= len(blocks)
            self.pool.free(blocks)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the tables hold exactly the used blocks, each once, and readers add up."""
        self.pool.check_integrity()
        tables = [*self._self_tables.values(), *(entry.blocks for entry in self._cross_tables.values())]
        owned = [block for table in tables for block in table]
        if len(owned) != len(set(owned)) or len(owned) != self.pool.num_used:
            raise IntegrityError(
                f"tables hold {len(owned)} blocks ({len(set(owned))} distinct), {self.pool.num_used} used"
            )
        for content_hash, entry in self._cross_tables.items():
            readers = {request_id for request_id, name in self._cross_of.items() if name == content_hash}
            if readers != entry.readers or (not readers) != (content_hash in self._unread):
                raise IntegrityError(
                    f"cross table {content_hash} counts {len(entry.readers)} readers, has {len(readers)}"
                )
        unread = sum(len(self._cross_tables[name].blocks) for name in self._unread)
        if unread != self._num_unread_blocks:
            raise IntegrityError(f"unread cross tables hold {unread} blocks, {self._num_unread_blocks} counted")
