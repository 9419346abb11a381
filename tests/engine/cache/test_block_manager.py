"""The block manager against a model of it, over arrays: the books add up, and nobody's tokens ever change.

The model knows tables of cells instead of block numbers: a cell is one block's worth of tokens, shared where the
manager should share and copied where it should copy. The arrays stand for the KV cache of a device and of a host. What
stands in a slot is a number for the whole history of its token, so that no two different histories look alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.cache.block_manager import BlockManager
from engine.cache.block_pool import BlockPool

SIZE = 3
NUM_BLOCKS, NUM_HOST_BLOCKS = 13, 10
ENCODER_TOKENS = {"": 0, "short": 2, "clip": 7, "long": 10}
NOTHING = -1
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=13)


class Cell:
    """One block, whatever its number is."""


@dataclass
class ModelSequence:
    tokens: list[int]
    num_computed: int = 0
    num_pending: int = 0
    cells: list[Cell] = field(default_factory=list)


@dataclass
class ModelRequest:
    content: str
    reads_cross: bool
    sequences: dict[int, ModelSequence] = field(default_factory=dict)
    swapped: bool = False


def blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // SIZE)


class BlockManagerMachine(RuleBasedStateMachine):
    """Every operation in any order. What is appended is written by the next `step`, after the moves."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(BlockPool(NUM_BLOCKS), SIZE, BlockPool(NUM_HOST_BLOCKS))
        self.device = np.full((NUM_BLOCKS, SIZE), NOTHING)
        self.host = np.full((NUM_HOST_BLOCKS, SIZE), NOTHING)
        self.requests: dict[str, ModelRequest] = {}
        self.cell_of: dict[bytes, Cell] = {}
        self.number_of: dict[Any, int] = {}
        self.count = 0

    # --- the model

    def value(self, history: Any) -> int:
        return self.number_of.setdefault(history, len(self.number_of))

    def values(self, content: str, tokens: list[int]) -> list[int]:
        return [self.value((content, *tokens[: end + 1])) for end in range(len(tokens))]

    def hashes(self, content: str, tokens: list[int]) -> list[bytes]:
        return [repr((content, tokens[:end])).encode() for end in range(SIZE, len(tokens) + 1, SIZE)]

    def on_device(self) -> list[tuple[str, int]]:
        return [
            (name, number) for name, one in self.requests.items() if not one.swapped for number in sorted(one.sequences)
        ]

    def references(self, cell: Cell) -> int:
        tables = (self.requests[name].sequences[number].cells for name, number in self.on_device())
        return sum(cell in cells for cells in tables)

    def used_cells(self) -> set[Cell]:
        found = (self.requests[name].sequences[number].cells for name, number in self.on_device())
        return {cell for cells in found for cell in cells}

    def readers(self, content: str) -> list[str]:
        return [n for n, one in self.requests.items() if one.content == content and one.reads_cross and not one.swapped]

    def num_used(self) -> int:
        cross = sum(blocks_for(tokens) for content, tokens in ENCODER_TOKENS.items() if self.readers(content))
        return len(self.used_cells()) + cross

    def num_free(self) -> int:
        return NUM_BLOCKS - 1 - self.num_used()

    def own_cells(self, name: str) -> int:
        return len({cell for one in self.requests[name].sequences.values() for cell in one.cells})

    def cross_blocks(self, name: str) -> int:
        one = self.requests[name]
        return blocks_for(ENCODER_TOKENS[one.content]) if one.reads_cross else 0

    def is_unshared(self, name: str) -> bool:
        """No block of the request is held by another one: the equations of the document hold exactly."""
        one = self.requests[name]
        mine = {cell: 0 for sequence in one.sequences.values() for cell in sequence.cells}
        for sequence in one.sequences.values():
            for cell in sequence.cells:
                mine[cell] += 1
        alone = all(count == self.references(cell) for cell, count in mine.items())
        return alone and (not one.reads_cross or self.readers(one.content) == [name])

    def draw_sequence(self, data: st.DataObject, *, pending: bool | None = None) -> tuple[str, int] | None:
        found = [
            (name, number)
            for name, number in self.on_device()
            if pending is None or bool(self.requests[name].sequences[number].num_pending) == pending
        ]
        return data.draw(st.sampled_from(found)) if found else None

    # --- operations

    @rule(tokens=TOKENS, content=st.sampled_from(sorted(ENCODER_TOKENS)), cached=st.booleans())
    def begin(self, tokens: list[int], content: str, *, cached: bool) -> None:
        """A request comes with its first sequence, and takes what is known of its tokens (but the last)."""
        manager, length = self.manager, ENCODER_TOKENS[content]
        prefix = self.hashes(content, tokens[:-1]) if cached else []
        found = [self.cell_of[name] for name in prefix[: manager.match_prefix(prefix)]]
        held = len(self.used_cells() & set(found))
        missing = blocks_for(len(tokens)) - held + (0 if self.readers(content) else blocks_for(length))
        before = self.num_free()
        prefix = prefix[: len(found)]
        needed = manager.missing_blocks(len(tokens), length, content, prefix)
        assert (needed <= manager.num_free) == (missing <= before)
        if missing > before:
            return
        self.count += 1
        name = f"r{self.count}"
        known = manager.has_cross(content)
        if length:
            manager.allocate_cross(name, length, content)
            assert manager.needs_writing(name) == (not known)
        num_cached = manager.allocate(self.count, len(tokens), prefix)
        assert num_cached <= len(found) * SIZE
        cells = found[: num_cached // SIZE]
        cells = cells + [Cell() for _ in range(blocks_for(len(tokens)) - len(cells))]
        sequence = ModelSequence(list(tokens), num_cached, len(tokens) - num_cached, cells)
        self.requests[name] = ModelRequest(content, bool(length), {self.count: sequence})
        if num_cached == len(found) * SIZE:
            assert manager.num_free == before - missing

    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def append(self, data: st.DataObject, tokens: list[int]) -> None:
        """A sequence gets room for more tokens; what it is about to write becomes its own."""
        picked = self.draw_sequence(data, pending=False)
        if picked is None:
            return
        name, number = picked
        sequence = self.requests[name].sequences[number]
        known = sequence.tokens[: sequence.num_computed] + tokens
        index = sequence.num_computed // SIZE
        copies = index < len(sequence.cells) and self.references(sequence.cells[index]) > 1
        growth = max(0, blocks_for(len(known)) - len(sequence.cells)) + copies
        before = self.num_free()
        assert self.manager.can_append(number, sequence.num_computed, len(known)) == (growth <= before)
        if growth > before:
            return
        self.manager.append(number, sequence.num_computed, len(known))
        assert self.manager.num_free == before - growth
        if copies:
            sequence.cells[index] = Cell()
        sequence.cells += [Cell() for _ in range(blocks_for(len(known)) - len(sequence.cells))]
        sequence.tokens, sequence.num_pending = known, len(tokens)

    @rule()
    def step(self) -> None:
        """Carry the moves out, write what was scheduled, remember what is full."""
        self.carry_out_moves()
        for name in list(self.requests):
            one = self.requests[name]
            if not one.swapped and self.manager.needs_writing(name):
                slots = range(ENCODER_TOKENS[one.content])
                self.write(self.manager.get_cross_block_table(name), 0, [self.value((one.content, i)) for i in slots])
                self.manager.mark_written(name)
        for name, number in self.on_device():
            one, sequence = self.requests[name], self.requests[name].sequences[number]
            values = self.values(one.content, sequence.tokens)
            begin, end = sequence.num_computed, sequence.num_computed + sequence.num_pending
            self.write(self.manager.tables[number], begin, values[begin:end])
            sequence.num_computed, sequence.num_pending = end, 0
        self.everybody_reads_what_was_written()
        for name, number in self.on_device():
            one, sequence = self.requests[name], self.requests[name].sequences[number]
            for index, known in enumerate(self.hashes(one.content, sequence.tokens[: sequence.num_computed])):
                is_new = not self.manager.match_prefix([known])
                self.manager.remember(number, index, [known])
                if is_new:
                    self.cell_of[known] = sequence.cells[index]

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """A sequence with everything that another one has computed; it costs nothing."""
        picked = self.draw_sequence(data, pending=False)
        if picked is None:
            return
        name, number = picked
        parent = self.requests[name].sequences[number]
        before = self.manager.num_free
        self.count += 1
        whole = len(parent.cells) == blocks_for(parent.num_computed)
        num_blocks = None if whole else parent.num_computed // SIZE
        self.manager.fork(number, self.count, num_blocks)
        computed = parent.num_computed if whole else parent.num_computed // SIZE * SIZE
        child = ModelSequence(parent.tokens[:computed], computed, 0, list(parent.cells[:num_blocks]))
        self.requests[name].sequences[self.count] = child
        assert self.manager.num_free == before

    @precondition(lambda self: any(not one.swapped for one in self.requests.values()))
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        """Whatever was scheduled for the request is not written: it does not run."""
        name = data.draw(st.sampled_from([n for n, one in self.requests.items() if not one.swapped]))
        one, manager = self.requests[name], self.manager
        needed = self.own_cells(name) + self.cross_blocks(name)
        unwritten = one.reads_cross and manager.needs_writing(name)
        expected = needed <= manager.host.pool.num_free and not unwritten
        assert manager.can_swap_out(name, list(one.sequences)) == expected
        if not expected:
            return
        before, host_before, alone = manager.num_free, manager.host.pool.num_free, self.is_unshared(name)
        manager.swap_out(name, list(one.sequences))
        one.swapped = True
        for sequence in one.sequences.values():
            sequence.num_pending = 0
        assert manager.host.pool.num_free == host_before - needed
        if alone:
            assert manager.num_free == before + needed

    @precondition(lambda self: any(one.swapped for one in self.requests.values()))
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([n for n, one in self.requests.items() if one.swapped]))
        one, manager = self.requests[name], self.manager
        own, cross = self.own_cells(name), self.cross_blocks(name)
        needed = own + (0 if self.readers(one.content) else cross)
        before, host_before = manager.num_free, manager.host.pool.num_free
        assert manager.missing_to_swap_in(name) == needed
        if needed > before:
            return
        manager.swap_in(name)
        one.swapped = False
        fresh: dict[Cell, Cell] = {}  # the cached ones stay where they were
        for sequence in one.sequences.values():
            sequence.cells = [fresh.setdefault(cell, Cell()) for cell in sequence.cells]
        assert manager.num_free == before - needed
        assert manager.host.pool.num_free == host_before + own + cross

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """One sequence goes, wherever it is; the pool that it is in gets what nobody else holds."""
        name = data.draw(st.sampled_from(sorted(self.requests)))
        one = self.requests[name]
        if not one.sequences:
            return
        number = data.draw(st.sampled_from(sorted(one.sequences)))
        own = self.own_cells(name)
        before, host_before = self.manager.num_free, self.manager.host.pool.num_free
        expected = before if one.swapped else before + len(self.manager.releasable_blocks(set(), [number]))
        cells = one.sequences.pop(number).cells
        self.manager.free(number)
        assert self.manager.num_free == expected
        if one.swapped:
            assert self.manager.host.pool.num_free == host_before + own - self.own_cells(name)
        elif not any(self.references(cell) for cell in cells):
            assert self.manager.num_free == before + len(cells)
        self.forget_if_empty(name)

    @precondition(lambda self: any(one.reads_cross for one in self.requests.values()))
    @rule(data=st.data())
    def free_cross(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([n for n, one in self.requests.items() if one.reads_cross]))
        one, cross = self.requests[name], self.cross_blocks(name)
        before, host_before = self.manager.num_free, self.manager.host.pool.num_free
        self.manager.free_cross(name)
        one.reads_cross = False
        assert self.manager.host.pool.num_free == host_before + (cross if one.swapped else 0)
        gone = not one.swapped and not self.readers(one.content)
        assert self.manager.num_free == before + (cross if gone else 0)
        self.forget_if_empty(name)

    @precondition(lambda self: any(not one.swapped for one in self.requests.values()))
    @rule(data=st.data(), tokens=TOKENS, content=st.sampled_from(sorted(ENCODER_TOKENS)))
    def end_some(self, data: st.DataObject, tokens: list[int], content: str) -> None:
        """Requests go together. What another one would miss then is known before, shared with them or not."""
        names = [name for name, one in self.requests.items() if not one.swapped]
        ending = data.draw(st.sets(st.sampled_from(names), min_size=1))
        numbers = [number for name in ending for number in self.requests[name].sequences]
        prefix = self.hashes(content, tokens[:-1])
        prefix = prefix[: self.manager.match_prefix(prefix)]
        needs = len(tokens), ENCODER_TOKENS[content], content, prefix
        released = self.manager.releasable_blocks(ending, numbers)
        before, missing = self.manager.num_free, self.manager.missing_blocks(*needs, released)
        for name in ending:
            for number in self.requests.pop(name).sequences:
                self.manager.free(number)
            self.manager.free_cross(name)
        assert self.manager.num_free == before + len(released)
        assert self.manager.missing_blocks(*needs) == missing

    def forget_if_empty(self, name: str) -> None:
        one = self.requests[name]
        if not one.sequences and not one.reads_cross:
            del self.requests[name]
            assert not self.manager.is_swapped(name)

    @rule()
    def reset(self) -> None:
        """The document on encoder-decoder requests: all blocks of the device and of the host are free."""
        self.manager.reset()
        self.requests.clear()
        self.cell_of.clear()
        assert self.manager.pool.num_free == self.manager.pool.num_usable == NUM_BLOCKS - 1
        assert self.manager.host.pool.num_free == self.manager.host.pool.num_usable == NUM_HOST_BLOCKS - 1
        assert self.manager.pop_moves() == []

    # --- the arrays

    def carry_out_moves(self) -> None:
        ends = {"copy": (self.device, self.device), "out": (self.device, self.host), "in": (self.host, self.device)}
        for move in self.manager.pop_moves():
            source, target = ends[move.kind]
            target[move.target] = source[move.source]
        for pool, array in ((self.manager.pool, self.device), (self.manager.host.pool, self.host)):
            assert pool is not None
            for block in range(pool.num_blocks):
                if not pool.references(block):
                    array[block] = NOTHING

    def write(self, table: list[int], begin: int, values: list[int]) -> None:
        for position, value in enumerate(values, start=begin):
            self.device[table[position // SIZE], position % SIZE] = value

    def everybody_reads_what_was_written(self) -> None:
        for name, number in self.on_device():
            one, sequence = self.requests[name], self.requests[name].sequences[number]
            known = self.device[self.manager.tables[number]].ravel()[: sequence.num_computed]
            assert known.tolist() == self.values(one.content, sequence.tokens[: sequence.num_computed])
        for name, one in self.requests.items():
            if one.reads_cross and not one.swapped:
                length = ENCODER_TOKENS[one.content]
                read = self.device[self.manager.get_cross_block_table(name)].ravel()[:length]
                assert read.tolist() == [self.value((one.content, index)) for index in range(length)]

    # --- what always holds

    @invariant()
    def the_books_add_up(self) -> None:
        manager = self.manager
        manager.check_integrity()
        assert manager.num_used == self.num_used()
        assert manager.num_free + manager.num_used == manager.pool.num_usable
        assert manager.num_cached == manager.num_free - manager.pool.num_free
        swapped = sum(self.own_cells(n) + self.cross_blocks(n) for n, one in self.requests.items() if one.swapped)
        assert manager.host.pool.num_free == NUM_HOST_BLOCKS - 1 - swapped

    @invariant()
    def blocks_are_shared_where_the_model_shares_cells(self) -> None:
        block_of: dict[Cell, int] = {}
        for name, number in self.on_device():
            cells = self.requests[name].sequences[number].cells
            table = self.manager.tables[number]
            assert len(table) == len(cells)
            for cell, block in zip(cells, table, strict=True):
                assert block_of.setdefault(cell, block) == block
        assert len(set(block_of.values())) == len(block_of)

    def teardown(self) -> None:
        self.step()


BlockManagerMachine.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestBlockManager = BlockManagerMachine.TestCase
