"""Block tables over one pool: a self-attention table per sequence, a cross-attention table per encoder input.

    request a ─┬─ sequence 0 ── [ 7 ][ 9 ][ 4 ]
               ├─ sequence 1 ── [ 7 ][ 9 ][ 6 ]        forked: full blocks are shared, the last one is copied on write
               └─ cross table ┐
    request b ─┬─ cross table ┴─ [ 2 ][ 3 ]            one copy per content, however many requests read it
               └─ sequence 0 ── [ 7 ][ 5 ]             the same first tokens: found in the prefix cache

Three things outlive their readers until their room is needed, least recently used first: full blocks whose content is
known by a hash (prefix cache), and written cross tables. Both count as free. All tables index the same per-layer
KV tensors, so one budget holds for everything.

The manager only counts; where data has to follow (copy on write, swapping), it leaves `BlockMove`s, to be carried out
in their order before the next forward pass.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Literal

from engine.cache.block_pool import BlockPool, HostTables, IntegrityError, share_again


@dataclass(frozen=True)
class BlockMove:
    """Copy block `source` to `target`: within the device (`copy`), to the host (`out`) or back (`in`)."""

    kind: Literal["copy", "out", "in"]
    source: int
    target: int


@dataclass
class _CrossTable:
    blocks: list[int]
    readers: set[str] = field(default_factory=set)
    written: bool = False


class BlockManager:
    """Assign blocks to sequences. Lengths are in tokens; sequences are known by number, requests by name."""

    def __init__(self, pool: BlockPool, block_size: int, host_pool: BlockPool | None = None) -> None:
        self.pool = pool
        self.host = HostTables(host_pool or BlockPool(1))
        self.block_size = block_size
        self.counters = {"cross_table_hits": 0, "forks": 0, "block_copies": 0, "blocks_swapped_out": 0}
        self.counters |= {"blocks_swapped_in": 0, "prefix_evictions": 0}
        self.tables: dict[int, list[int]] = {}
        """The self tables on the device, by sequence."""
        self._cross_tables: dict[str, _CrossTable] = {}  # by content
        self._cross_of: dict[str, str] = {}  # request id -> content
        self._block_of: dict[bytes, int] = {}  # the prefix cache
        self._hash_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int | str, None] = OrderedDict()  # blocks and contents nobody holds, oldest first
        self.num_cached = 0
        """Blocks without a reader, kept for the next request with the same prefix or encoder content."""
        self._moves: list[BlockMove] = []

    # --- how much there is

    @property
    def num_free(self) -> int:
        """Blocks available to a new table: free blocks, and cached blocks without a reader."""
        return self.pool.num_free + self.num_cached

    @property
    def num_used(self) -> int:
        return self.pool.num_used - self.num_cached

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def fits_ever(self, num_prompt_tokens: int, lengths: Sequence[int], num_encoder_tokens: int = 0) -> bool:
        """Return whether sequences of the given lengths fit into an otherwise empty pool.

        Several ones share the full blocks of their prompt and no more: that is what they need at worst.
        """
        shared = num_prompt_tokens // self.block_size if len(lengths) > 1 else 0
        own = sum(self.blocks_for(length) - shared for length in lengths)
        return shared + own + self.blocks_for(num_encoder_tokens) <= self.pool.num_usable

    def missing_blocks(
        self,
        num_tokens: int,
        num_encoder_tokens: int = 0,
        content: str = "",
        prefix: Sequence[bytes] = (),
        released: AbstractSet[int] = frozenset(),
    ) -> int:
        """Return how many blocks of `num_free` a sequence and its cross table would use, after the holders of the
        `released` blocks were freed."""
        cached = [self._block_of[name] for name in prefix[: self.match_prefix(prefix)]]
        held = sum(1 for block in cached if block not in self._idle and block not in released)
        return self.blocks_for(num_tokens) - held + self._missing_cross(num_encoder_tokens, content, released)

    def _missing_cross(self, num_encoder_tokens: int, content: str, released: AbstractSet[int]) -> int:
        entry = self._cross_tables.get(content)
        is_held = entry is not None and entry.readers and released.isdisjoint(entry.blocks)
        return 0 if is_held else self.blocks_for(num_encoder_tokens)

    # --- self tables

    def match_prefix(self, prefix: Sequence[bytes]) -> int:
        """How many leading blocks of a chain of hashes are in the prefix cache."""
        return next((index for index, name in enumerate(prefix) if name not in self._block_of), len(prefix))

    def allocate(self, sequence_id: int, num_tokens: int, prefix: Sequence[bytes] = ()) -> int:
        """Make the table of a new sequence; return how many of its tokens are cached already.

        `prefix` are hashes of leading full blocks that may be taken from the prefix cache.
        """
        if sequence_id in self.tables:
            raise IntegrityError(f"sequence {sequence_id} has a block table already")
        cached = [self._block_of[name] for name in prefix[: self.match_prefix(prefix)]]
        for block in cached:
            self._hold(block)
        self.tables[sequence_id] = cached + self._pop_blocks(self.blocks_for(num_tokens) - len(cached))
        return len(cached) * self.block_size

    def can_append(self, sequence_id: int, num_computed: int, num_tokens: int) -> bool:
        """Return whether the table can grow to `num_tokens` in all, with tokens from `num_computed` on still to be
        written: by new blocks, and a copy where the next write hits a shared block."""
        table, index = self.tables[sequence_id], num_computed // self.block_size
        growth = max(0, self.blocks_for(num_tokens) - len(table))
        shared = index < len(table) and self.pool.references(table[index]) > 1
        return growth + shared <= self.num_free

    def append(self, sequence_id: int, num_computed: int, num_tokens: int) -> None:
        """Grow a table to hold `num_tokens` in all; the block of token `num_computed` becomes the sequence's own."""
        table = self.tables[sequence_id]
        index = num_computed // self.block_size
        if index < len(table) and self.pool.references(table[index]) > 1:
            [own] = self._pop_blocks(1)
            self._moves.append(BlockMove("copy", table[index], own))
            self._release([table[index]])
            table[index] = own
            self.counters["block_copies"] += 1
        missing = self.blocks_for(num_tokens) - len(table)
        if missing > 0:
            table.extend(self._pop_blocks(missing))

    def fork(self, parent_id: int, child_id: int, num_blocks: int | None = None) -> None:
        """Give a new sequence the table of another, or the first `num_blocks` of the table. Later writes copy shared
        blocks."""
        if child_id in self.tables:
            raise IntegrityError(f"sequence {child_id} has a block table already")
        table = self.tables[parent_id][:num_blocks]
        self.pool.share(table)
        self.tables[child_id] = table
        self.counters["forks"] += 1

    def free(self, sequence_id: int) -> None:
        """Free a sequence's table, on the device or on the host. A sequence without a table is ignored."""
        self._release(self.tables.pop(sequence_id, []))
        self.host.free(sequence_id)

    def remember(self, sequence_id: int, first: int, hashes: Sequence[bytes]) -> None:
        """Publish full blocks `first`, `first + 1`, … of a sequence under the given hashes, for other requests to
        find."""
        for block, name in zip(self.tables[sequence_id][first:], hashes, strict=False):
            if name not in self._block_of and block not in self._hash_of:
                self._block_of[name] = block
                self._hash_of[block] = name

    # --- cross tables

    def allocate_cross(self, request_id: str, num_encoder_tokens: int, content: str) -> None:
        """Let a request read the cross table of `content`; make the table if none exists."""
        entry = self._cross_tables.get(content)
        if entry is None:
            entry = _CrossTable(self._pop_blocks(self.blocks_for(num_encoder_tokens), in_a_run=True))
            self._cross_tables[content] = entry
        else:
            self.counters["cross_table_hits"] += 1
            if content in self._idle:
                del self._idle[content]
                self.num_cached -= len(entry.blocks)
        entry.readers.add(request_id)
        self._cross_of[request_id] = content

    def has_cross(self, content: str) -> bool:
        """Whether the keys and values of this content are in the cache, read or not."""
        entry = self._cross_tables.get(content)
        return entry is not None and entry.written

    def awaits_cross(self, content: str) -> bool:
        """Return whether the cross table of `content` exists, but its KV is still to be written."""
        entry = self._cross_tables.get(content)
        return entry is not None and not entry.written

    def get_cross_block_table(self, request_id: str) -> list[int]:
        content = self._cross_of.get(request_id)
        return [] if content is None else self._cross_tables[content].blocks

    def needs_writing(self, request_id: str) -> bool:
        """True for the first reader of a cross table, until `mark_written`."""
        content = self._cross_of.get(request_id)
        return content is not None and not self._cross_tables[content].written

    def mark_written(self, request_id: str) -> None:
        """Record that the KV of the request's cross table is in its blocks."""
        self._cross_tables[self._cross_of[request_id]].written = True

    def free_cross(self, request_id: str) -> None:
        """Stop reading the cross table. A written table stays for the next request after its last reader; a copy on the
        host is freed at once."""
        self.host.free_cross(request_id)
        content = self._cross_of.pop(request_id, None)
        if content is None:
            return
        entry = self._cross_tables[content]
        entry.readers.remove(request_id)
        if entry.readers:
            return
        if entry.written:
            self._idle[content] = None
            self.num_cached += len(entry.blocks)
        else:
            self.pool.free(self._cross_tables.pop(content).blocks)

    # --- whole requests

    def held_blocks(self, sequence_ids: Iterable[int]) -> set[int]:
        """The distinct blocks in the tables of some sequences."""
        return {block for name in sequence_ids for block in self.tables.get(name, ())}

    def releasable_blocks(self, request_ids: AbstractSet[str], sequence_ids: Iterable[int]) -> set[int]:
        """Return the blocks that freeing all tables of some requests would add to `num_free`."""
        counts = Counter(block for name in sequence_ids for block in self.tables.get(name, ()))
        released = {block for block, count in counts.items() if self.pool.references(block) == count}
        for content in {self._cross_of[name] for name in request_ids if name in self._cross_of}:
            if self._cross_tables[content].readers <= request_ids:
                released.update(self._cross_tables[content].blocks)
        return released

    # --- swapping

    def can_swap_out(self, request_id: str, sequence_ids: Sequence[int]) -> bool:
        """Return whether the host has room for a request, and whether its cross table, if any, is worth keeping."""
        needed = len(self.held_blocks(sequence_ids)) + len(self.get_cross_block_table(request_id))
        has_room = self.host.pool.num_usable > 0 and needed <= self.host.pool.num_free
        return has_room and not self.needs_writing(request_id)

    def swap_out(self, request_id: str, sequence_ids: Sequence[int]) -> None:
        """Move the tables of a request to the host. Blocks shared with other requests stay on the device for them."""
        tables = {name: self.tables[name] for name in sequence_ids if name in self.tables}
        cross = self.get_cross_block_table(request_id)
        content = self._cross_of.get(request_id, "")
        for name in tables:
            self._release(self.tables.pop(name))
        self.free_cross(request_id)
        host = self.host.put(request_id, tables, cross, content)
        self._moves += [BlockMove("out", block, target) for block, target in host.items()]
        self.counters["blocks_swapped_out"] += len(host)

    def is_swapped(self, request_id: str) -> bool:
        return request_id in self.host.requests

    def missing_to_swap_in(self, request_id: str, released: AbstractSet[int] = frozenset()) -> int:
        """Return how many blocks of `num_free` a call of `swap_in` would use, `released` as for `missing_blocks`."""
        swapped = self.host.requests[request_id]
        num_encoder_tokens = len(swapped.cross) * self.block_size
        return len(swapped.self_blocks) + self._missing_cross(num_encoder_tokens, swapped.content, released)

    def swap_in(self, request_id: str) -> None:
        """Move the tables of a request back to the device, shared among its sequences as before."""
        swapped = self.host.pop(request_id)
        if swapped.cross:
            known = self.has_cross(swapped.content)
            self.allocate_cross(request_id, len(swapped.cross) * self.block_size, swapped.content)
            if not known:
                self._bring_in(swapped.cross, self.get_cross_block_table(request_id))
                self.mark_written(request_id)
        distinct = swapped.self_blocks
        device = dict(zip(distinct, self._pop_blocks(len(distinct)), strict=True))
        self._bring_in(distinct, [device[block] for block in distinct])
        tables = {name: [device[block] for block in table] for name, table in swapped.tables.items()}
        share_again(self.pool, tables.values())
        self.tables |= tables

    def _bring_in(self, host: Sequence[int], device: Sequence[int]) -> None:
        self._moves += [BlockMove("in", source, target) for source, target in zip(host, device, strict=True)]
        self.counters["blocks_swapped_in"] += len(host)

    def pop_moves(self) -> list[BlockMove]:
        """Return the copies to make before the next forward pass, in order, and forget them."""
        moves, self._moves = self._moves, []
        return moves

    def reset(self) -> None:
        """Free all tables, on the device and on the host, and forget what is cached: every block is free."""
        for sequence_id in [*self.tables, *self.host.sequence_ids]:
            self.free(sequence_id)
        for request_id in [*self._cross_of, *self.host.requests]:
            self.free_cross(request_id)
        self.pool.free(self._pop_blocks(self.pool.num_usable))
        self._moves.clear()

    # --- blocks between use and disuse

    def _hold(self, block: int) -> None:
        """Add a table to the holders of a block, idle or not."""
        if block in self._idle:
            del self._idle[block]
            self.num_cached -= 1
        else:
            self.pool.share([block])

    def _release(self, blocks: Sequence[int]) -> None:
        """Remove a table from the holders of each block. Known content stays cached; the last block is evicted
        first."""
        for block in reversed(blocks):
            if self.pool.references(block) == 1 and block in self._hash_of:
                self._idle[block] = None
                self.num_cached += 1
            else:
                self.pool.free([block])

    def _pop_blocks(self, count: int, *, in_a_run: bool = False) -> list[int]:
        """Allocate `count` blocks. Cached blocks are evicted, least recently used first, until there are as many."""
        while self.pool.num_free < count and self._idle:
            name, _ = self._idle.popitem(last=False)
            blocks = self._cross_tables.pop(name).blocks if isinstance(name, str) else [name]
            if isinstance(name, int):
                del self._block_of[self._hash_of.pop(name)]
                self.counters["prefix_evictions"] += 1
            self.num_cached -= len(blocks)
            self.pool.free(blocks)
        return self.pool.allocate_run(count) if in_a_run else self.pool.allocate(count)

    # --- the books

    def check_integrity(self) -> None:
        """Raise IntegrityError unless references, tables, caches and both pools add up."""
        self.pool.check_integrity()
        tables = [*self.tables.values(), *(entry.blocks for entry in self._cross_tables.values())]
        idle = [name for name in self._idle if isinstance(name, int)]
        counts = Counter(block for table in (*tables, idle) for block in table)
        if len(counts) != self.pool.num_used or any(self.pool.references(b) != n for b, n in counts.items()):
            raise IntegrityError(f"tables hold {len(counts)} blocks, {self.pool.num_used} are used, or counts differ")
        for content, entry in self._cross_tables.items():
            readers = {request_id for request_id, name in self._cross_of.items() if name == content}
            if readers != entry.readers or (not readers) != (content in self._idle):
                raise IntegrityError(f"cross table {content} counts {len(entry.readers)} readers, has {len(readers)}")
        kept = [len(self._cross_tables[name].blocks) for name in self._idle if isinstance(name, str)]
        if len(idle) + sum(kept) != self.num_cached:
            raise IntegrityError(f"{len(idle) + sum(kept)} blocks are idle, {self.num_cached} counted")
        if self._block_of != {name: block for block, name in self._hash_of.items()}:
            raise IntegrityError("the prefix cache and its blocks do not agree")
        self.host.check_integrity()
