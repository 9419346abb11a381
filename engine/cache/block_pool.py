"""Pools of blocks on the device and the host: fixed-size pieces of KV memory, by number (PagedAttention, Kwon et al.,
2023), and the tables of requests that are swapped out to the host.

    block id     0         1 ... num_blocks - 1
               [ never ] [ free, or in use with one reference per block table that holds it ]

Block 0 is never handed out: padding in block tables points to it, so a stray write cannot hurt anybody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


class IntegrityError(RuntimeError):
    """Two counts that must always agree do not."""


class BlockPool:
    """Free and used blocks of one device. `num_blocks` includes block 0, reserved for padding and never handed out."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks, self.num_usable = num_blocks, num_blocks - 1
        self._free = list(range(num_blocks - 1, 0, -1))
        self._references: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._references)

    def references(self, block: int) -> int:
        """Return how many tables hold a block; 0 for a free block."""
        return self._references.get(block, 0)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks with a reference each. Raises ValueError if fewer are free."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked for, {self.num_free} free")
        blocks = self._free[len(self._free) - count :][::-1]
        del self._free[len(self._free) - count :]
        self._references.update(dict.fromkeys(blocks, 1))
        return blocks

    def allocate_run(self, count: int) -> list[int]:
        """Allocate `count` blocks, with consecutive numbers if possible.

        A run can be read as one slice instead of being gathered; long read-only tables (cross-attention) profit.
        """
        free = self._free
        free.sort(reverse=True)
        for end in range(len(free), count - 1, -1):
            if free[end - count] - free[end - 1] == count - 1:
                free[end - count :] = free[end:] + free[end - count : end]  # the last are allocated
                break
        return self.allocate(count)

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block. Raises IntegrityError for a free block."""
        for block in blocks:
            if block not in self._references:
                raise IntegrityError(f"block {block} is shared but not in use")
            self._references[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Remove a reference from each block and free blocks without references. Raises IntegrityError for a free
        block."""
        for block in blocks:
            count = self._references.get(block)
            if count is None:
                raise IntegrityError(f"block {block} is freed but not in use")
            if count > 1:
                self._references[block] = count - 1
            else:
                del self._references[block]
        self._free.extend(block for block in reversed(blocks) if block not in self._references)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every usable block is either free or used, once."""
        free = set(self._free)
        if len(free) != len(self._free) or free & self._references.keys() or 0 in free or 0 in self._references:
            raise IntegrityError("a block is free twice, free and used, or block 0 was handed out")
        if len(free) + len(self._references) != self.num_usable:
            raise IntegrityError(f"{len(free)} free + {len(self._references)} used != {self.num_usable} blocks")


@dataclass
class SwappedRequest:
    """A request's blocks on the host: tables by sequence, and the cross table if the request has one."""

    tables: dict[int, list[int]]
    cross: list[int]
    content: str

    @property
    def self_blocks(self) -> list[int]:
        """The distinct blocks of the self tables."""
        return sorted({block for table in self.tables.values() for block in table})


@dataclass(eq=False)
class HostTables:
    """Assign host blocks to requests."""

    pool: BlockPool
    requests: dict[str, SwappedRequest] = field(default_factory=dict)

    @property
    def sequence_ids(self) -> list[int]:
        return [sequence_id for request in self.requests.values() for sequence_id in request.tables]

    def put(
        self, request_id: str, tables: Mapping[int, Sequence[int]], cross: Sequence[int], content: str
    ) -> dict[int, int]:
        """Store the tables of a request; return pairs of device block and host block."""
        distinct = sorted({block for table in tables.values() for block in table} | set(cross))
        host = dict(zip(distinct, self.pool.allocate(len(distinct)), strict=True))
        moved = {name: [host[block] for block in table] for name, table in tables.items()}
        share_again(self.pool, moved.values())
        self.requests[request_id] = SwappedRequest(moved, [host[block] for block in cross], content)
        return host

    def pop(self, request_id: str) -> SwappedRequest:
        """Remove a request and free its host blocks. Moves queued earlier still read their content."""
        swapped = self.requests.pop(request_id)
        for table in swapped.tables.values():
            self.pool.free(table)
        self.pool.free(swapped.cross)
        return swapped

    def free(self, sequence_id: int) -> None:
        """Free a sequence's table. A sequence without a table is ignored."""
        request_id = next((name for name, one in self.requests.items() if sequence_id in one.tables), None)
        if request_id is not None:
            self.pool.free(self.requests[request_id].tables.pop(sequence_id))
            self._forget_if_empty(request_id)

    def free_cross(self, request_id: str) -> None:
        """Free a request's cross table. A request without a cross table is ignored."""
        if request_id in self.requests:
            self.pool.free(self.requests[request_id].cross)
            self.requests[request_id].cross = []
            self._forget_if_empty(request_id)

    def _forget_if_empty(self, request_id: str) -> None:
        if not (self.requests[request_id].tables or self.requests[request_id].cross):
            del self.requests[request_id]

    def check_integrity(self) -> None:
        """Raise IntegrityError unless references and tables add up."""
        self.pool.check_integrity()
        tables = [table for swapped in self.requests.values() for table in (*swapped.tables.values(), swapped.cross)]
        counts = Counter(block for table in tables for block in table)
        if len(counts) != self.pool.num_used or any(self.pool.references(b) != n for b, n in counts.items()):
            raise IntegrityError(f"swapped tables hold {len(counts)} host blocks, {self.pool.num_used} are used")


def share_again(pool: BlockPool, tables: Iterable[Sequence[int]]) -> None:
    """Add a reference to a block for each further table with the block."""
    seen: set[int] = set()
    for table in tables:
        pool.share(block for block in table if block in seen)
        seen.update(table)
