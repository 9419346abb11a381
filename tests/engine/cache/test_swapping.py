"""Preemption: swapped or computed again, a request gives the tokens that it gives undisturbed."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from common.messages import Failed, InputNeeded
from common.model_info import ModelInfo
from tests.engine.conftest import AUDIO_FRAMES
from tests.engine.driving import Driver, Job, greedy, make_engine, run, sampled, text, text_tokens

POLICIES = ("recompute", "swap", "auto")


@dataclass(frozen=True)
class Workload:
    """Jobs, and a pool of `num_blocks` of 4 tokens that is too small for them."""

    model: str
    num_blocks: int
    jobs: Callable[[ModelInfo], list[Job]]


def several(name: str, length: int, *, width: int = 0) -> Job:
    params = greedy(10, n=2, beam_width=width) if width else sampled(10, n=3)
    return text(name, length, params)


def pictures(info: ModelInfo) -> list[Job]:
    placeholder = info.placeholder_token_id or 0
    jobs = []
    for number, rows in enumerate([[6, 3], [8], [2, 7], [5]]):
        token_ids = text_tokens(number, 3)
        for index in range(len(rows)):
            token_ids += [placeholder, *text_tokens(10 * number + index, 2)]
        media = [(f"picture {number} {index}", count) for index, count in enumerate(rows)]
        params = sampled(12, n=2) if number % 2 else greedy(12)
        jobs.append(Job(f"p{number}", token_ids, params, media))
    return jobs


def clips(info: ModelInfo) -> list[Job]:
    start = int(info.config["decoder_start_token_id"])
    kinds = [greedy(16), sampled(12, n=3), greedy(10, n=3, beam_width=3), greedy(16), sampled(12, n=2)]
    names = ["a", "b", "c", "a", "d"]  # the first and the fourth are over the same clip
    return [
        Job(f"c{number}", [start, *text_tokens(number, 4)], params, [(names[number], AUDIO_FRAMES)])
        for number, params in enumerate(kinds)
    ]


WORKLOADS = {
    "text": Workload("tiny_llama", 12, lambda _: [text(f"t{i}", 12, greedy()) for i in range(5)]),
    "several sequences": Workload("tiny_llama", 18, lambda _: [several(f"n{i}", 9) for i in range(4)]),
    "beams": Workload("tiny_llama", 20, lambda _: [several(f"b{i}", 9, width=4) for i in range(3)]),
    "mixed": Workload(
        "tiny_llama",
        20,
        lambda _: [several("b", 10, width=4), text("t", 30, greedy()), several("n", 6), text("u", 3, sampled())],
    ),
    "pictures": Workload("tiny_vision", 17, pictures),
    "speech": Workload("tiny_speech", 19, clips),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", WORKLOADS)
def test_preempted_requests_give_the_tokens_of_an_undisturbed_run(
    name: str, policy: str, request: pytest.FixtureRequest
) -> None:
    load = WORKLOADS[name]
    info = request.getfixturevalue(load.model)
    jobs = load.jobs(info)
    expected = run(make_engine(info), jobs, watch=False)
    assert expected.engine.stats()["preemptions_total"] == 0
    driver = run(make_engine(info, load.num_blocks, preemption=policy, max_num_batched_tokens=24), jobs)
    stats = driver.engine.stats()
    assert not driver.failures
    assert driver.tokens == expected.tokens
    assert stats["preemptions_total"] > 0
    swaps = stats["preemptions_by_swap_total"]
    assert (swaps > 0) == (policy == "swap" or (policy == "auto" and name != "text"))
    brought, taken = stats["blocks_swapped_in_total"], stats["blocks_swapped_out_total"]
    assert brought == taken or (name == "speech" and 0 < brought < taken)  # a clip's blocks may still be on the device
    assert stats["kv_host_blocks_free"] == driver.engine.runner.num_host_blocks


def test_a_swapped_request_asks_for_none_of_its_pictures_again(tiny_vision: ModelInfo) -> None:
    """They are in its keys and values, which were kept; what is computed again needs them once more."""
    jobs = pictures(tiny_vision)
    lost = {}
    for policy in ("swap", "recompute"):
        # Without a prefix cache, and with an encoder cache of one picture: nothing else could save them.
        options = {"preemption": policy, "prefix_caching": False, "encoder_cache_bytes": 8 * 64 * 4}
        driver = run(make_engine(tiny_vision, 17, **options), jobs)
        assert driver.engine.stats()["preemptions_total"] > 0
        lost[policy] = driver.count(InputNeeded), driver.num_sent
    num_pictures = sum(len(job.media) for job in jobs)
    assert lost["swap"] == (0, num_pictures)
    assert lost["recompute"][0] > 0
    assert lost["recompute"][1] > num_pictures


def test_swapped_blocks_come_back_bit_for_bit(tiny_speech: ModelInfo) -> None:
    """Self and cross blocks of three sequences, through a host pool and other device blocks."""
    engine = make_engine(tiny_speech, 40)
    driver = Driver(engine)
    job = clips(tiny_speech)[1]
    driver.add(job)
    driver.step_while(lambda: len(driver.tokens) < 3 or len(driver.tokens[job.name, 0]) < 6)
    [request] = engine.scheduler.running
    tables = {one.sequence_id: engine.blocks.tables[one.sequence_id] for one in request.sequences}
    cross = engine.blocks.get_cross_block_table(job.name)
    before = [cache.clone() for cache in engine.runner.caches]
    engine.scheduler.preemption = "swap"
    engine.scheduler.preempt(request)
    engine.runner.move(engine.blocks.pop_moves())
    for cache in engine.runner.caches:
        cache.fill_(7.5)
    squatter = -1
    engine.blocks.allocate(squatter, 4 * engine.blocks.num_free)  # takes its old blocks; the clip is given up
    assert not engine.blocks.has_cross(request.encoder_content)
    engine.blocks.free(squatter)
    engine.blocks.allocate(squatter, 4 * 3)
    engine.blocks.swap_in(job.name)
    engine.runner.move(engine.blocks.pop_moves())
    pairs = [(tables[name], engine.blocks.tables[name]) for name in tables]
    pairs.append((cross, engine.blocks.get_cross_block_table(job.name)))
    assert all(old != new for old, new in pairs)
    for layer, cache in enumerate(engine.runner.caches):
        for old, new in pairs:
            assert torch.equal(cache[:, new], before[layer][:, old])
    shared = tables[request.sequences[0].sequence_id][0]
    assert [table[0] for table in tables.values()] == [shared] * 3
    assert len({engine.blocks.tables[name][0] for name in tables}) == 1
    engine.blocks.free(squatter)


@pytest.mark.parametrize("host_blocks", [0, 3])
def test_what_the_host_has_no_room_for_is_computed_again(tiny_llama: ModelInfo, host_blocks: int) -> None:
    jobs = WORKLOADS["several sequences"].jobs(tiny_llama)
    expected = run(make_engine(tiny_llama), jobs, watch=False).tokens
    block_bytes = make_engine(tiny_llama).runner.block_bytes
    driver = run(make_engine(tiny_llama, 18, preemption="swap", swap_bytes=host_blocks * block_bytes), jobs)
    assert driver.engine.stats()["preemptions_total"] > 0
    assert driver.engine.stats()["preemptions_by_swap_total"] < driver.engine.stats()["preemptions_total"]
    assert host_blocks or driver.engine.stats()["preemptions_by_swap_total"] == 0
    assert driver.tokens == expected


@pytest.mark.parametrize("end", ["abort", "stop one sequence", "stop all sequences"])
def test_a_request_that_ends_on_the_host_leaves_nothing_there(tiny_llama: ModelInfo, end: str) -> None:
    engine = make_engine(tiny_llama, 40, preemption="swap")
    driver = Driver(engine)
    driver.add(several("r", 9))
    expected = run(make_engine(tiny_llama), [several("r", 9)], watch=False).tokens
    driver.step_to_token(3, "r", 2)  # each has written a block of its own
    engine.scheduler.preempt(engine.scheduler.running[0])
    assert engine.blocks.is_swapped("r")
    used = engine.runner.num_host_blocks - engine.blocks.host.pool.num_free
    if end == "abort":
        engine.abort("r")
        assert engine.is_empty()
    else:
        for index in (1, 0, 2)[: 1 if end == "stop one sequence" else 3]:
            engine.stop_sequence("r", index)
        assert engine.runner.num_host_blocks - engine.blocks.host.pool.num_free < used
    engine.check_integrity()
    driver.finish()
    assert engine.blocks.host.pool.num_free == engine.runner.num_host_blocks
    for index in (0, 2) if end == "stop one sequence" else ():
        assert driver.tokens["r", index] == expected["r", index]
    assert driver.count(Failed) == 0


def test_a_request_that_needs_the_whole_pool_comes_back_from_the_host(tiny_llama: ModelInfo) -> None:
    """Its last block is half full: it needs no other one for its next token, and there is none."""
    job = text("r", 14, greedy(6))
    expected = run(make_engine(tiny_llama), [job], watch=False).tokens
    engine = make_engine(tiny_llama, 5, preemption="swap")
    driver = Driver(engine)
    driver.add(job)
    driver.step_to_token(4, "r")
    assert engine.blocks.num_free == 0
    driver.add(text("urgent", 5, greedy(3), priority=-1))
    driver.step()
    assert engine.blocks.is_swapped("r")
    driver.finish()
    assert driver.tokens["r", 0] == expected["r", 0]
    assert driver.ends["r", 0].finish_reason == "length"


def test_sequences_that_just_fit_the_pool_run_to_their_end(tiny_llama: ModelInfo) -> None:
    """Two full blocks of prompt for all three, and for each a third and a fourth of its own."""
    job = text("r", 9, sampled(8, n=3))
    expected = run(make_engine(tiny_llama), [job], watch=False).tokens
    for policy in POLICIES:
        driver = Driver(make_engine(tiny_llama, 2 + 3 * 2, preemption=policy))
        driver.add(job)
        driver.step_to_token(5, "r", 2)
        driver.engine.scheduler.preempt(driver.engine.scheduler.running[0])
        assert driver.finish() == expected
