"""The outputs that an encoder keeps: a budget in bytes, lent outputs are safe, the least recently used go first."""

from __future__ import annotations

import random

import numpy as np
import torch

from common.config import EngineConfig
from common.messages import InputLayout
from engine.cache.encoder_cache import OutputCache, in_memory_of_its_own
from engine.device.memory import MemoryReport, output_cache_bytes
from engine.processors import ProcessedInput

MIB = 2**20
ROW_BYTES = 16 * 4


def output(rows: int) -> tuple[ProcessedInput, torch.Tensor]:
    layout = InputLayout(rows, [(1, rows)])
    item = ProcessedInput({"pixels": np.zeros((3, 8))}, layout, (rows, 16), "float32", rows * ROW_BYTES)
    return item, torch.full((rows, 16), float(rows))


def test_an_output_comes_back_with_all_that_an_offer_tells_but_not_with_what_it_was_made_of() -> None:
    cache = OutputCache(10 * ROW_BYTES)
    item, tensor = output(4)
    assert cache.acquire("a") is None
    cache.put("a", item, tensor)
    kept = cache.acquire("a")
    assert kept is not None
    assert kept.tensor is tensor
    assert kept.item.arrays == {}
    told = (item.layout, item.shape, item.dtype, item.size_bytes)
    assert (kept.item.layout, kept.item.shape, kept.item.dtype, kept.item.size_bytes) == told
    assert (cache.hits, cache.misses, cache.used_bytes) == (1, 1, tensor.nbytes)


def test_the_least_recently_used_is_evicted_first() -> None:
    cache = OutputCache(10 * ROW_BYTES)
    for name in "abc":
        cache.put(name, *output(3))
    assert cache.acquire("a") is not None
    cache.release("a")
    cache.put("d", *output(4))
    assert [name for name in "abcd" if cache.acquire(name)] == ["a", "c", "d"]
    assert (cache.evictions, cache.used_bytes) == (1, 10 * ROW_BYTES)


def test_what_is_lent_stays_and_what_finds_no_room_beside_it_is_not_kept() -> None:
    cache = OutputCache(10 * ROW_BYTES)
    cache.put("lent", *output(6))
    cache.put("idle", *output(4))
    first, second = cache.acquire("lent"), cache.acquire("lent")
    assert first is second is not None
    cache.put("large", *output(5))
    assert cache.acquire("large") is None
    assert cache.evictions == 0, "nothing is given up for what cannot be kept"
    cache.put("small", *output(4))
    assert cache.acquire("idle") is None
    cache.release("lent")
    cache.put("larger", *output(6))
    assert cache.acquire("larger") is None, "it is still lent once"
    cache.release("lent")
    cache.put("larger", *output(6))
    assert cache.acquire("larger") is not None


def test_without_a_budget_nothing_is_kept() -> None:
    cache = OutputCache(0)
    cache.put("a", *output(1))
    assert cache.acquire("a") is None


def test_the_budget_holds_whatever_comes_and_goes() -> None:
    rng, cache, lent = random.Random(5), OutputCache(20 * ROW_BYTES), list[str]()
    for _ in range(2000):
        name = f"content {rng.randrange(12)}"
        if lent and rng.random() < 0.55:
            cache.release(lent.pop(rng.randrange(len(lent))))
        elif kept := cache.acquire(name):
            lent.append(name)
            assert bool((kept.tensor == kept.item.shape[0]).all())
        else:
            cache.put(name, *output(rng.randrange(1, 9)))
        held = sum(kept.tensor.nbytes for kept in cache._entries.values())
        assert cache.used_bytes == held <= cache.capacity_bytes
        assert set(lent) == set(cache._lent) <= set(cache._entries)
    assert cache.evictions > 100
    assert cache.hits > 100


def test_a_row_of_a_batch_does_not_keep_its_neighbours() -> None:
    batch = torch.arange(12.0).view(3, 4)
    row = in_memory_of_its_own(batch[1])
    assert row.untyped_storage().nbytes() == row.nbytes
    assert row.tolist() == batch[1].tolist()
    assert in_memory_of_its_own(batch).data_ptr() == batch.data_ptr(), "what is whole is not copied"


def test_its_budget_is_given_or_a_small_part_of_what_an_encoder_may_take() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert output_cache_bytes(EngineConfig(memory_bytes=1600 * MIB), cpu) == 100 * MIB
    assert output_cache_bytes(EngineConfig(memory_bytes=2**40), cpu) == 256 * MIB
    assert output_cache_bytes(EngineConfig(), cuda) == 256 * MIB
    assert output_cache_bytes(EngineConfig(encoder_output_cache_bytes=0), cpu) == 0
    assert output_cache_bytes(EngineConfig(encoder_output_cache_bytes=3 * MIB), cuda) == 3 * MIB


def test_an_encoders_memory_report_tells_it_apart_from_the_budget() -> None:
    config = EngineConfig(encoder_output_cache_bytes=3 * MIB)
    report = MemoryReport.of_encoder(config, weights=MIB, activation=MIB, budget=9 * MIB, output_cache=3 * MIB)
    stats = report.stats()
    assert (stats["encoder_output_cache_bytes"], stats["encoder_output_cache_given"]) == (3 * MIB, 1.0)
    assert stats["memory_budget_bytes"] == 9 * MIB
    assert report.describe()["encoder_output_cache"] == "3 MiB given"
    without = MemoryReport.of_encoder(EngineConfig(), weights=MIB, activation=MIB, budget=9 * MIB, output_cache=0)
    assert "encoder_output_cache_bytes" not in without.stats()
