"""Prefill and decode apart, with too little room on either side: everything ends, with the tokens it should have."""

import pytest

from common.messages import KV_INPUT_ID, InputNeeded
from common.model_info import ModelInfo
from engine.core.decoder_engine import DecoderEngine
from engine.state.events import KvComputed
from engine.state.request import Request
from tests.engine.cache.test_swapping import clips, pictures
from tests.engine.driving import Driver, Generated, Job, greedy, run, sampled, text, text_tokens
from tests.engine.handoff.handing_over import Pair, quick_engine

POLICIES = ("recompute", "swap", "auto")


def texts(_: ModelInfo) -> list[Job]:
    kinds = [greedy(10), sampled(10, n=2), greedy(8), sampled(12), greedy(6, n=2, beam_width=2)]
    return [text(f"t{i}", 5 + 4 * (i % 4), kinds[i % 5], priority=-(i % 3 == 2)) for i in range(10)]


def many_pictures(info: ModelInfo) -> list[Job]:
    return pictures(info) + [Job(f"q{i}", *_rest(job)) for i, job in enumerate(pictures(info))]


def many_clips(info: ModelInfo) -> list[Job]:
    return clips(info) + [Job(f"d{i}", *_rest(job)) for i, job in enumerate(clips(info))]


def _rest(job: Job) -> tuple[list[int], object, list[tuple[str, int]]]:
    return job.token_ids, job.params, [(f"other {name}", rows) for name, rows in job.media]


LOADS = {"tiny_llama": (texts, 8, 10), "tiny_vision": (many_pictures, 9, 14), "tiny_speech": (many_clips, 8, 16)}
"""Jobs, and pools of so many blocks of 4 tokens: each just holds its largest request."""


def undisturbed(info: ModelInfo, jobs: list[Job]) -> Generated:
    return run(quick_engine(info), jobs, watch=False).tokens


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", LOADS)
def test_small_pools_on_both_sides_drain(model: str, policy: str, request: pytest.FixtureRequest) -> None:
    info: ModelInfo = request.getfixturevalue(model)
    make_jobs, num_prefill, num_decode = LOADS[model]
    jobs = make_jobs(info)
    options = {"preemption": policy, "max_num_batched_tokens": 12}
    pair = Pair(quick_engine(info, num_prefill, **options), quick_engine(info, num_decode, **options), part_tokens=3)
    for job in jobs:
        pair.add(job)
    assert pair.finish() == undisturbed(info, jobs)
    decode = pair.receiver.engine.stats()
    assert decode["prefill_handoffs_total"] == len(jobs)
    assert decode["preemptions_total"] > 0
    if policy != "recompute":
        assert decode["recomputed_tokens_total"] == 0, "what was handed over is swapped"
        assert decode["preemptions_by_swap_total"] == decode["preemptions_total"]


def start_one(info: ModelInfo, job: Job, policy: str) -> tuple[Pair, DecoderEngine]:
    engine = quick_engine(info, preemption=policy, max_num_batched_tokens=4, prefix_caching=False)
    pair = Pair(engine, quick_engine(info), part_tokens=2)
    pair.add(job)
    return pair, engine


def running(engine: DecoderEngine, name: str) -> Request:
    return next(request for request in engine.scheduler.running if request.request_id == name)


@pytest.mark.parametrize("num_parts", [0, 2, 5], ids=["before the first part", "halfway", "near the end"])
@pytest.mark.parametrize("policy", ["recompute", "swap"])
def test_a_prefill_that_is_preempted_goes_on_where_it_was(tiny_llama: ModelInfo, policy: str, num_parts: int) -> None:
    job = text("r", 14, greedy(5))
    pair, engine = start_one(tiny_llama, job, policy)
    while pair.transfers["r"].part < num_parts or not engine.scheduler.running:
        pair.step()
    engine.scheduler.preempt(running(engine, "r"))
    assert engine.export_kv("r", "self", 0, 1) is None, "its blocks are not its own now"
    assert pair.finish() == undisturbed(tiny_llama, [job])
    assert (engine.stats()["recomputed_tokens_total"] > 0) == (policy == "recompute")
    assert pair.receiver.engine.stats()["prefill_handoff_tokens_total"] == len(job.token_ids) - 1


@pytest.mark.parametrize("policy", ["recompute", "swap"])
def test_a_complete_prefill_that_loses_its_blocks_gets_them_back(tiny_llama: ModelInfo, policy: str) -> None:
    """Nothing of it is left to compute, but somebody waits for what it has."""
    job = text("r", 14, greedy(5))
    pair, engine = start_one(tiny_llama, job, policy)
    while not (engine.scheduler.running and running(engine, "r").is_prefilled_here):
        pair.sender.step()
    engine.scheduler.preempt(running(engine, "r"))
    pair.sender.events.clear()
    assert pair.finish() == undisturbed(tiny_llama, [job])
    assert KvComputed("r", 13) in pair.sender.events, "whoever waits for it is told that it is back"


def test_a_granted_prefill_takes_the_blocks_of_those_that_are_not(tiny_llama: ModelInfo) -> None:
    """Else the receiver's reservation would wait for somebody who may wait for room at the same receiver."""
    engine = quick_engine(tiny_llama, 8)
    pair = Pair(engine, quick_engine(tiny_llama))
    granted = text("granted", 22, greedy(4), priority=5)
    pair.sender.add(granted, prefill_only=True)
    pair.sender.step()
    engine.scheduler.preempt(running(engine, "granted"))
    urgent = [text(f"urgent {i}", 13, greedy(4), priority=-1) for i in range(2)]
    for job in urgent:
        pair.sender.add(job, prefill_only=True)
    while not (len(engine.scheduler.running) == 2 and all(one.is_prefilled_here for one in engine.scheduler.running)):
        pair.sender.step()
    assert not engine.has_work(), "the pool is full of what waits for its grant"
    engine.grant_kv("granted")
    engine.grant_kv("granted")
    while not any(one.request_id == "granted" and one.is_prefilled_here for one in engine.scheduler.running):
        assert engine.has_work()
        pair.sender.step()
    for name in ("granted", "urgent 0", "urgent 1"):
        engine.abort(name)
    assert engine.is_empty()


def test_a_prefill_takes_blocks_back_once_its_picture_is_there_and_not_before(tiny_vision: ModelInfo) -> None:
    """Before, it could only compute what stands in front of the picture, and would make way at once: without end."""
    engine = quick_engine(tiny_vision, 3)
    driver = Driver(engine)
    placeholder = tiny_vision.placeholder_token_id or 0
    driver.add(Job("r", [7, 8, placeholder, 9], greedy(2), [("x", 2)]), offer=False, prefill_only=True)
    driver.step()
    driver.add(text("later", 11, greedy(1)), prefill_only=True)
    driver.step_while(lambda: not any(one.is_prefilled_here for one in engine.scheduler.running))
    for _ in range(5):
        driver.step()
    assert not engine.has_work(), "one waits for its picture, the other one for its grant"
    assert engine.stats()["preemptions_total"] == 1
    driver.offer("r", 0)
    while not any(one.request_id == "r" and one.is_prefilled_here for one in engine.scheduler.running):
        assert engine.has_work()
        driver.step()
    for name in ("r", "later"):
        engine.abort(name)
    assert engine.is_empty()


def test_a_prefill_takes_no_blocks_that_are_not_enough_for_it(tiny_vision: ModelInfo) -> None:
    """Whoever gave them would have them back at once, and give them again: without end."""
    engine = quick_engine(tiny_vision, 4)
    driver = Driver(engine)
    placeholder = tiny_vision.placeholder_token_id or 0
    driver.add(text("earlier", 8, greedy(1)), prefill_only=True)
    token_ids = [*text_tokens(1, 6), placeholder, 9, placeholder, 9]
    driver.add(Job("r", token_ids, greedy(1), [("x", 2), ("y", 2)]), offer=False, prefill_only=True)
    for input_id in (0, 1):
        driver.offer("r", input_id)
    driver.add(text("later", 4, greedy(1)), prefill_only=True)
    engine.withdraw("r", 1, 0)
    for _ in range(10):
        driver.step()
    assert not engine.has_work(), "two wait for their grants, the other one for its second picture"
    for name in ("earlier", "r", "later"):
        engine.abort(name)
    assert engine.is_empty()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_that_ran_out_of_blocks_begins_again_once_there_are_more(tiny_llama: ModelInfo, policy: str) -> None:
    """Before, its first tokens would be computed, and given up for want of the next block: without end."""
    engine = quick_engine(tiny_llama, 4, max_num_batched_tokens=4, preemption=policy, prefix_caching=False)
    driver = Driver(engine)
    for name, length in ("earlier", 13), ("later", 10):
        driver.add(text(name, length, greedy(1)), prefill_only=True)
    driver.step_while(lambda: not engine.stats()["preemptions_total"])
    for _ in range(5):
        driver.step()
    assert not engine.has_work(), "one waits for its grant, the other one for its blocks"
    assert engine.stats()["preemptions_total"] == 1
    engine.end_prefill("earlier")
    driver.step_while(lambda: KvComputed("later", 9) not in driver.events)
    engine.end_prefill("later")
    driver.finish()
    assert engine.is_empty()


@pytest.mark.parametrize("policy", ["recompute", "swap"])
@pytest.mark.parametrize("model", ["tiny_vision", "tiny_speech"])
def test_a_decode_that_is_preempted_asks_for_media_only_if_it_must(
    model: str, policy: str, request: pytest.FixtureRequest
) -> None:
    info: ModelInfo = request.getfixturevalue(model)
    job = (pictures(info) if model == "tiny_vision" else clips(info))[0]
    expected = undisturbed(info, [job])
    pair = Pair(quick_engine(info), quick_engine(info, preemption=policy, prefix_caching=False))
    pair.add(job)
    while len(pair.receiver.tokens.get((job.name, 0), ())) < 4:
        pair.step()
    engine = pair.receiver.engine
    [victim] = engine.scheduler.running
    cross_stays = bool(engine.blocks.get_cross_block_table(job.name))
    engine.scheduler.preempt(victim)
    engine.blocks.allocate(-1, 4 * engine.blocks.num_free)  # what nobody holds is given up
    engine.blocks.free(-1)
    engine.abort("somebody else")  # it looks again at what is in its caches
    assert pair.finish() == expected
    asked = [event.input_id for event in pair.receiver.events if isinstance(event, InputNeeded)]
    assert KV_INPUT_ID not in asked
    assert asked == ([] if policy == "swap" else list(range(len(job.media))))
    assert (engine.stats()["recomputed_tokens_total"] > 0) == (policy == "recompute")
    assert cross_stays == (model == "tiny_speech")


def test_a_request_of_higher_priority_takes_the_blocks_of_one_that_decodes(tiny_llama: ModelInfo) -> None:
    jobs = [text("low", 9, greedy(12), priority=1), text("high", 13, greedy(4))]
    pair = Pair(quick_engine(tiny_llama), quick_engine(tiny_llama, 6))
    pair.add(jobs[0])
    while len(pair.receiver.tokens.get(("low", 0), ())) < 4:
        pair.step()
    pair.add(jobs[1])
    while ("high", 0) not in pair.receiver.ends:
        pair.step()
    assert ("low", 0) not in pair.receiver.ends
    assert pair.receiver.engine.blocks.is_swapped("low")
    assert pair.finish() == undisturbed(tiny_llama, jobs)


def test_an_offer_does_not_overtake_a_request_that_waits_for_its_blocks(tiny_llama: ModelInfo) -> None:
    """And a request behind the offer does not overtake that one: room goes to who is first."""
    engine = quick_engine(tiny_llama, 6, max_num_seqs=4)
    pair = Pair(quick_engine(tiny_llama), engine)
    jobs = [text("first", 9, greedy(12)), text("offered", 17, greedy(4)), text("here", 2, greedy(2))]
    pair.add(jobs[0])
    while len(pair.receiver.tokens.get(("first", 0), ())) < 4:
        pair.step()
    for job in jobs[1:]:
        pair.add(job) if job.name == "offered" else pair.receiver.add(job)
    for _ in range(4):
        pair.step()
    assert engine.stats()["kv_offers_pending"] == 1
    assert [request.request_id for request in engine.scheduler.waiting] == ["here"]
    assert (engine.stats()["requests_running"], engine.stats()["requests_waiting"]) == (1, 2)
    assert pair.finish() == undisturbed(tiny_llama, jobs)
    order = list(dict.fromkeys(name for name, _ in pair.receiver.ends))
    assert order == ["first", "here", "offered"] or order == ["first", "offered", "here"]


@pytest.mark.parametrize("policy", POLICIES)
def test_an_offer_takes_the_blocks_of_a_later_request_that_cannot_go_on(tiny_vision: ModelInfo, policy: str) -> None:
    """`later` waits for room in the encoder cache: `next` has it, and may not begin before `offered` has blocks."""
    placeholder = tiny_vision.placeholder_token_id or 0
    offered = text("offered", 50, greedy(4))
    next_one = Job("next", [placeholder, 30], greedy(6), [("x", 6)])
    later = Job("later", [7, placeholder, 8, placeholder, 9], greedy(6), [("y", 6), ("z", 6)])
    options = {"preemption": policy, "prefix_caching": False}
    sender = quick_engine(tiny_vision)
    image_bytes = 6 * sender.runner.spec.encoder_width * 4
    engine = quick_engine(tiny_vision, 14, **options, encoder_cache_bytes=image_bytes)
    pair = Pair(sender, engine)
    pair.receiver.add(offered, offer=False, prefilled=True)
    for job in (next_one, later):
        pair.receiver.add(job, offer=False)
    pair.receiver.offer("later", 0)
    while engine.has_work():
        pair.step()
    assert [request.request_id for request in engine.scheduler.running] == ["later"]
    pair.hand_over(offered)
    while not engine.stats()["kv_offers_pending"]:
        pair.step()
    pair.receiver.offer("next", 0)
    pair.step()
    pair.receiver.offer("later", 1)
    assert pair.finish() == undisturbed(tiny_vision, [offered, next_one, later])
    assert [name for name, _ in pair.receiver.ends] == ["offered", "next", "later"]
