"""The pool hands blocks out once, and the encoder cache keeps within its bytes, whatever the order of operations."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.model_info import load_model_info
from engine.cache.block_manager import BlockManager
from engine.cache.block_pool import BlockPool, IntegrityError
from engine.cache.encoder_cache import EncoderCacheManager
from tests.engine.driving import make_engine
from tests.tiny.text import make_qwen3


def test_block_0_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0


def test_freeing_a_block_twice_is_noticed() -> None:
    pool = BlockPool(5)
    [block] = pool.allocate(1)
    pool.free([block])
    with pytest.raises(IntegrityError, match="not in use"):
        pool.free([block])


@pytest.mark.parametrize(("num_kv_heads", "share"), [(32, 1), (8, 4), (1, 32)])
def test_fewer_heads_of_keys_than_of_queries_take_so_much_less_cache(
    tmp_path: Path, num_kv_heads: int, share: int
) -> None:
    """The document on attention: 32 query heads with 8 of keys and values, as Llama 3's, take a quarter."""
    heads = {"num_attention_heads": 32, "num_key_value_heads": num_kv_heads, "head_dim": 8}
    engine = make_engine(load_model_info(str(make_qwen3(tmp_path, num_hidden_layers=2, **heads))), 4, block_size=4)
    assert engine.stats()["kv_block_bytes"] * share == 2 * 2 * 4 * 32 * 8 * 4, "keys and values, layers, slots, float32"


def test_a_run_of_blocks_is_consecutive_where_one_is_free() -> None:
    pool = BlockPool(10)
    blocks = pool.allocate(9)
    pool.free([blocks[i] for i in (0, 2, 4, 5, 6)])
    run = pool.allocate_run(3)
    assert run == [run[0], run[0] + 1, run[0] + 2]
    assert len(pool.allocate_run(2)) == 2  # no run is left: any two do
    pool.check_integrity()


def test_a_cross_table_outlives_its_last_reader_until_its_blocks_are_needed() -> None:
    manager = BlockManager(BlockPool(9), block_size=4)
    manager.allocate_cross("a", 12, "clip")
    manager.mark_written("a")
    blocks = manager.get_cross_block_table("a")
    manager.free_cross("a")
    assert (manager.num_free, manager.num_cached) == (8, 3)
    manager.allocate_cross("b", 12, "clip")
    assert manager.get_cross_block_table("b") == blocks
    assert not manager.needs_writing("b")
    manager.free_cross("b")
    manager.allocate(0, 32)
    manager.check_integrity()
    assert manager.num_cached == 0
    assert not manager.has_cross("clip")


def test_a_cross_table_that_was_never_written_is_not_kept() -> None:
    manager = BlockManager(BlockPool(9), block_size=4)
    manager.allocate_cross("a", 12, "clip")
    manager.free_cross("a")
    assert manager.num_cached == 0
    manager.allocate_cross("b", 12, "clip")
    assert manager.needs_writing("b")


def test_a_swapped_cross_table_comes_back_where_the_device_has_lost_it() -> None:
    """It is copied back only then: a table of the same content that is still there serves as well."""
    manager = BlockManager(BlockPool(9), 4, BlockPool(9))
    for lost in (False, True):
        manager.allocate(0, 4)
        manager.allocate_cross("a", 12, "clip")
        manager.mark_written("a")
        manager.swap_out("a", [0])
        if lost:
            manager.allocate(1, 32)
            manager.free(1)
        assert manager.has_cross("clip") == (not lost)
        assert manager.missing_to_swap_in("a") == 4
        manager.pop_moves()
        manager.swap_in("a")
        brought = [move.target for move in manager.pop_moves() if move.kind == "in"]
        tables = manager.tables[0] + (manager.get_cross_block_table("a") if lost else [])
        assert sorted(brought) == sorted(tables)
        assert not manager.needs_writing("a")
        manager.free(0)
        manager.free_cross("a")
        manager.check_integrity()
    assert manager.host.pool.num_free == 8


def test_a_swapped_sequence_that_ends_gives_its_host_blocks_back() -> None:
    """A sibling that it shares a block with keeps that one."""
    manager = BlockManager(BlockPool(9), 4, BlockPool(9))
    manager.allocate(0, 6)
    manager.fork(0, 1)
    manager.append(1, 6, 7)
    manager.swap_out("r", [0, 1])
    assert manager.host.pool.num_free == 8 - 3
    manager.free(0)
    assert manager.host.pool.num_free == 8 - 2
    manager.swap_in("r")
    assert (manager.num_used, manager.host.pool.num_free) == (2, 8)
    assert 0 not in manager.tables
    manager.check_integrity()


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
