"""The block pool: fixed-size pieces of KV memory, handed out by number (PagedAttention, Kwon et al., 2023).

    block id     0         1 ... num_blocks - 1
               [ never ] [ free, or in use with one reference per block table that holds it ]

Block 0 is never handed out: padding in block tables points to it, so a stray write cannot hurt anybody.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class IntegrityError(RuntimeError):
    """Two counts that must always agree do not."""


class BlockPool:
    """Free and used blocks of one device. `num_blocks` includes block 0, reserved for padding and never handed out."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a block pool needs at least 2 blocks, not {num_blocks}")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))
        self._references: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._references)

    @property
    def num_usable(self) -> int:
        """Number of blocks usable at once."""
        return self.num_blocks - 1

    def can_allocate(self, count: int) -> bool:
        return count <= len(self._free)

    def references(self, block: int) -> int:
        """Return how many tables hold a block; 0 for a free block."""
        return self._references.get(block, 0)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks with a reference each. Raises ValueError if fewer are free: ask `can_allocate`
        first."""
        if not self.can_allocate(count):
            raise ValueError(f"{count} blocks asked for, {self.num_free} free")
        blocks = self._free[len(self._free) - count :][::-1]
        del self._free[len(self._free) - count :]
        self._references.update(dict.fromkeys(blocks, 1))
        return blocks

    def allocate_run(self, count: int) -> list[int]:
        """Allocate `count` blocks, with consecutive numbers if possible.

        A run can be read as one slice instead of being gathered; long read-only tables (cross-attention) profit.
        """
        if not self.can_allocate(count):
            raise ValueError(f"{count} blocks asked for, {self.num_free} free")
        self._free.sort(reverse=True)
        free = self._free
        for end in range(len(free), count - 1, -1):
            if free[end - count] - free[end - 1] == count - 1:
                run = free[end - count : end][::-1]
                del free[end - count : end]
                self._references.update(dict.fromkeys(run, 1))
                return run
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
