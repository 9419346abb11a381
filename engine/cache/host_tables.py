"""Block tables of swapped-out requests: copies on the host, in blocks of a separate pool."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from engine.cache.block_pool import BlockPool, IntegrityError


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


class HostTables:
    """Assign host blocks to requests. Without a `pool` the host has no room."""

    def __init__(self, pool: BlockPool | None) -> None:
        self.pool = pool
        self._requests: dict[str, SwappedRequest] = {}
        self._request_of: dict[int, str] = {}  # by sequence

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __getitem__(self, request_id: str) -> SwappedRequest:
        return self._requests[request_id]

    @property
    def num_free(self) -> int:
        return 0 if self.pool is None else self.pool.num_free

    @property
    def num_used(self) -> int:
        return 0 if self.pool is None else self.pool.num_usable - self.pool.num_free

    @property
    def sequence_ids(self) -> list[int]:
        return list(self._request_of)

    @property
    def request_ids(self) -> list[str]:
        return list(self._requests)

    def put(
        self, request_id: str, tables: Mapping[int, Sequence[int]], cross: Sequence[int], content: str
    ) -> dict[int, int]:
        """Store the tables of a request; return pairs of device block and host block."""
        assert self.pool is not None
        distinct = sorted({block for table in tables.values() for block in table} | set(cross))
        host = dict(zip(distinct, self.pool.allocate(len(distinct)), strict=True))
        moved = {name: [host[block] for block in table] for name, table in tables.items()}
        share_again(self.pool, moved.values())
        self._requests[request_id] = SwappedRequest(moved, [host[block] for block in cross], content)
        self._request_of |= dict.fromkeys(moved, request_id)
        return host

    def take(self, request_id: str) -> SwappedRequest:
        """Remove a request and free its host blocks. Moves queued earlier still read their content."""
        swapped = self._requests.pop(request_id)
        for name, table in swapped.tables.items():
            del self._request_of[name]
            self._free(table)
        self._free(swapped.cross)
        return swapped

    def free(self, sequence_id: int) -> None:
        """Free a sequence's table. A sequence without a table is ignored."""
        request_id = self._request_of.pop(sequence_id, None)
        if request_id is not None:
            self._free(self._requests[request_id].tables.pop(sequence_id))
            self._forget_if_empty(request_id)

    def free_cross(self, request_id: str) -> None:
        """Free a request's cross table. A request without a cross table is ignored."""
        if request_id in self._requests:
            self._free(self._requests[request_id].cross)
            self._requests[request_id].cross = []
            self._forget_if_empty(request_id)

    def _free(self, blocks: Sequence[int]) -> None:
        assert self.pool is not None
        self.pool.free(blocks)

    def _forget_if_empty(self, request_id: str) -> None:
        if not (self._requests[request_id].tables or self._requests[request_id].cross):
            del self._requests[request_id]

    def check_integrity(self) -> None:
        """Raise IntegrityError unless references and tables add up."""
        if self.pool is None:
            return
        self.pool.check_integrity()
        counts: dict[int, int] = {}
        for swapped in self._requests.values():
            for block in (block for table in (*swapped.tables.values(), swapped.cross) for block in table):
                counts[block] = counts.get(block, 0) + 1
        if len(counts) != self.pool.num_used or any(self.pool.references(b) != n for b, n in counts.items()):
            raise IntegrityError(f"swapped tables hold {len(counts)} host blocks, {self.pool.num_used} are used")


def share_again(pool: BlockPool, tables: Iterable[Sequence[int]]) -> None:
    """Add a reference to a block for each further table with the block."""
    seen: set[int] = set()
    for table in tables:
        pool.share(block for block in table if block in seen)
        seen.update(table)
