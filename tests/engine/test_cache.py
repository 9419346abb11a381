"""Blocks and bytes are conserved, whatever the order of operations."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.cache.block_manager import BlockManager
from engine.cache.block_pool import BlockPool, IntegrityError
from engine.cache.encoder_cache import EncoderCacheManager


def test_block_0_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert not pool.can_allocate(1)


def test_freeing_a_block_twice_is_noticed() -> None:
    pool = BlockPool(5)
    [block] = pool.allocate(1)
    pool.free([block])
    with pytest.raises(IntegrityError, match="not in use"):
        pool.free([block])


def test_a_run_of_blocks_is_consecutive_where_one_is_free() -> None:
    pool = BlockPool(10)
    blocks = pool.allocate(9)
    pool.free([blocks[i] for i in (0, 2, 4, 5, 6)])
    run = pool.allocate_run(3)
    assert run == [run[0], run[0] + 1, run[0] + 2]
    assert len(pool.allocate_run(2)) == 2  # no run is left: any two do
    pool.check_integrity()


class BlockManagerMachine(RuleBasedStateMachine):
    """Allocate, append, write and free in any order: blocks are conserved, and only equal content shares any."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(BlockPool(24), block_size=4)
        self.lengths: dict[str, tuple[int, str]] = {}
        self.count = 0

    ENCODER_TOKENS = {"": 0, "short": 3, "clip": 9, "long": 20}

    @rule(tokens=st.integers(1, 30), content=st.sampled_from(sorted(ENCODER_TOKENS)))
    def allocate(self, tokens: int, content: str) -> None:
        before, encoder_tokens = self.manager.num_free, self.ENCODER_TOKENS[content]
        read_by_others = any(name == content for _, name in self.lengths.values())
        needed = -(-tokens // 4) + (0 if read_by_others else -(-encoder_tokens // 4))
        assert self.manager.can_allocate(tokens, encoder_tokens, content) == (needed <= before)
        if needed <= before:
            self.count += 1
            self.manager.allocate(f"r{self.count}", tokens, encoder_tokens, content)
            self.lengths[f"r{self.count}"] = (tokens, content)
            assert self.manager.num_free == before - needed

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.lengths)))
        if self.manager.needs_writing(name):
            self.manager.mark_written(name)
            assert not self.manager.needs_writing(name)

    @precondition(lambda self: self.lengths)
    @rule(data=st.data(), more=st.integers(1, 9))
    def append(self, data: st.DataObject, more: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.lengths)))
        tokens, content = self.lengths[name]
        if self.manager.can_append(name, tokens + more):
            self.manager.append(name, tokens + more)
            self.lengths[name] = (tokens + more, content)

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.lengths)))
        before, gain = self.manager.num_free, self.manager.releasable_blocks(name)
        self.manager.free(name)
        del self.lengths[name]
        assert self.manager.num_free == before + gain

    @rule()
    def reset(self) -> None:
        self.manager.reset()
        self.lengths.clear()
        assert self.manager.pool.num_free == self.manager.pool.num_usable

    @invariant()
    def adds_up(self) -> None:
        self.manager.check_integrity()
        assert self.manager.num_free + self.manager.num_used == self.manager.pool.num_usable
        contents = {content for _, content in self.lengths.values()}
        cross = sum(-(-self.ENCODER_TOKENS[content] // 4) for content in contents)
        assert self.manager.num_used == cross + sum(-(-tokens // 4) for tokens, _ in self.lengths.values())
        for name, (tokens, content) in self.lengths.items():
            assert len(self.manager.get_block_table(name)) == -(-tokens // 4)
            assert len(self.manager.get_cross_block_table(name)) == -(-self.ENCODER_TOKENS[content] // 4)


def test_a_cross_table_outlives_its_last_reader_until_its_blocks_are_needed() -> None:
    manager = BlockManager(BlockPool(9), block_size=4)
    manager.allocate("a", 4, 12, "clip")
    manager.mark_written("a")
    blocks = manager.get_cross_block_table("a")
    manager.free("a")
    assert (manager.num_free, manager.num_cached) == (8, 3)
    manager.allocate("b", 4, 12, "clip")
    assert manager.get_cross_block_table("b") == blocks
    assert not manager.needs_writing("b")
    manager.free("b")
    manager.allocate("c", 32)
    manager.check_integrity()
    assert manager.num_cached == 0


def test_a_cross_table_that_was_never_written_is_not_kept() -> None:
    manager = BlockManager(BlockPool(9), block_size=4)
    manager.allocate("a", 4, 12, "clip")
    manager.free("a")
    assert manager.num_cached == 0
    manager.allocate("b", 4, 12, "clip")
    assert manager.needs_writing("b")


TestBlockManager = BlockManagerMachine.TestCase


class EncoderCacheMachine(RuleBasedStateMachine):
    """Reserve, commit, acquire, release in any order: the budget holds, and what is referenced stays."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = EncoderCacheManager(100)
        self.references: dict[str, set[tuple[str, int]]] = {}
        self.ready: set[str] = set()
        self.count = 0

    @rule(name=st.sampled_from("abcdef"), size=st.integers(1, 60))
    def reserve(self, name: str, size: int) -> None:
        if self.cache.is_ready(name) or self.cache.is_reserved(name) or not self.cache.can_reserve(size):
            return
        self.count += 1
        self.cache.reserve(name, size, ("r", self.count))
        self.references[name] = {("r", self.count)}
        self.ready.discard(name)

    @precondition(lambda self: any(self.references.values()))
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(n for n, refs in self.references.items() if refs)))
        if name in self.ready:
            with pytest.raises(IntegrityError):
                self.cache.commit(name, torch.zeros(1))
        else:
            self.cache.commit(name, torch.zeros(1))
            self.ready.add(name)

    @rule(name=st.sampled_from("abcdef"))
    def acquire(self, name: str) -> None:
        if self.cache.is_ready(name):
            self.count += 1
            self.cache.acquire(name, ("r", self.count))
            self.references.setdefault(name, set()).add(("r", self.count))

    @precondition(lambda self: any(self.references.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(n for n, refs in self.references.items() if refs)))
        reference = data.draw(st.sampled_from(sorted(self.references[name])))
        self.cache.release(name, reference)
        self.references[name].discard(reference)

    @invariant()
    def adds_up(self) -> None:
        self.cache.check_integrity()
        assert self.cache.used_bytes + self.cache.free_bytes == 100
        assert self.cache.peak_bytes <= 100
        for name, references in self.references.items():
            if references:
                assert self.cache.is_ready(name) == (name in self.ready)
                assert self.cache.is_reserved(name) != (name in self.ready)
        assert self.cache.num_references == sum(len(refs) for refs in self.references.values())


TestEncoderCache = EncoderCacheMachine.TestCase


@given(st.lists(st.integers(1, 4), min_size=1, max_size=8))
def test_unreferenced_content_leaves_least_recently_used_first(order: list[int]) -> None:
    cache = EncoderCacheManager(4)
    for number in range(1, 5):
        cache.reserve(str(number), 1, ("r", number))
        cache.commit(str(number), torch.zeros(1))
        cache.release(str(number), ("r", number))
    for number in order:
        cache.acquire(str(number), ("again", number))
        cache.release(str(number), ("again", number))
    used_last_first = list(dict.fromkeys([*reversed(order), 4, 3, 2, 1]))
    cache.reserve("new", 1, ("new", 0))
    assert not cache.is_ready(str(used_last_first[-1]))
    assert all(cache.is_ready(str(number)) for number in used_last_first[:-1])
