"""The overlapped loop beside the plain one: the same tokens, whatever happens while a step is in flight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.messages import Resumed, Tokens
from common.model_info import ModelInfo
from common.sampling_params import Grammar
from engine.core.decoder_engine import DecoderEngine
from engine.llm import LLM
from engine.state.request import UNKNOWN_TOKEN
from tests.engine.cache.test_swapping import WORKLOADS
from tests.engine.conftest import AUDIO_FRAMES
from tests.engine.driving import Driver, Generated, Job, greedy, run, sampled, text, text_tokens
from tests.engine.handoff.handing_over import Pair, quick_engine


def ahead_engine(info: ModelInfo, num_blocks: int = 300, **options: Any) -> DecoderEngine:
    """All of whose pools are given: it measures nothing at start."""
    return quick_engine(info, num_blocks, async_scheduling=True, **options)


def plain_engine(info: ModelInfo, num_blocks: int = 300, **options: Any) -> DecoderEngine:
    return quick_engine(info, num_blocks, async_scheduling=False, **options)


def with_an_encoder(info: ModelInfo) -> list[Job]:
    start = int(info.config["decoder_start_token_id"])
    params = [greedy(9), sampled(7, n=3), sampled(8, seed=3, temperature=0.6, top_k=7), greedy(4)]
    return [
        Job(f"x{number}", [start, *text_tokens(number, number)], one, [("ab"[number % 2], AUDIO_FRAMES)])
        for number, one in enumerate(params)
    ]


FAMILIES: dict[str, Callable[[ModelInfo], list[Job]]] = {
    "tiny_llama": WORKLOADS["mixed"].jobs,
    "tiny_vision": WORKLOADS["pictures"].jobs,
    "tiny_mllama": lambda info: [
        replace(job, token_ids=[*job.token_ids, 7]) for job in WORKLOADS["pictures"].jobs(info)
    ],
    "tiny_speech": WORKLOADS["speech"].jobs,
    "tiny_bart": with_an_encoder,
    "tiny_t5": with_an_encoder,
}


@pytest.mark.parametrize("model", FAMILIES)
def test_every_family_says_the_same_in_both_loops(model: str, request: pytest.FixtureRequest) -> None:
    info: ModelInfo = request.getfixturevalue(model)
    jobs = FAMILIES[model](info)
    plain, ahead = run(plain_engine(info), jobs), run(ahead_engine(info), jobs)
    assert not ahead.failures
    assert ahead.tokens == plain.tokens
    assert reasons(ahead) == reasons(plain)
    assert plain.engine.stats()["steps_ahead_total"] == 0 < ahead.engine.stats()["steps_ahead_total"]
    assert ahead.engine.stats()["surplus_tokens_total"] == 0  # all end by their length, which is known beforehand


def reasons(driver: Driver) -> dict[tuple[str, int], str | None]:
    return {name: event.finish_reason for name, event in driver.ends.items()}


@pytest.mark.parametrize("policy", ["recompute", "swap"])
@pytest.mark.parametrize("name", ["several sequences", "mixed", "pictures", "speech"])
def test_preemption_waits_for_the_tokens_in_flight(name: str, policy: str, request: pytest.FixtureRequest) -> None:
    load = WORKLOADS[name]
    info: ModelInfo = request.getfixturevalue(load.model)
    jobs = load.jobs(info)
    options = {"preemption": policy, "max_num_batched_tokens": 24}
    driver = run(ahead_engine(info, load.num_blocks, **options), jobs)
    stats = driver.engine.stats()
    assert driver.tokens == run(plain_engine(info), jobs, watch=False).tokens
    assert stats["preemptions_total"] > 0
    assert (stats["preemptions_by_swap_total"] > 0) == (policy == "swap")
    assert stats["steps_ahead_total"] > 0
    assert stats["kv_host_blocks_free"] == driver.engine.runner.num_host_blocks


def test_what_the_host_has_to_look_at_is_not_run_ahead_of(tiny_llama: ModelInfo) -> None:
    """Each beside two plain requests, which go ahead again once it has ended."""
    rules: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"n": 2, "beam_width": 3},
        {"prompt_logprobs": 1},
        {"grammar": Grammar("regex", "[a-z]+")},
    ]
    others = [text("plain", 7, greedy(20)), text("drawn", 5, sampled(20, n=2))]
    for rule in rules:
        jobs = [*others, text("ruled", 9, greedy(5, **rule))]
        plain, ahead = run(plain_engine(tiny_llama), jobs), run(ahead_engine(tiny_llama), jobs)
        assert (ahead.tokens, reasons(ahead)) == (plain.tokens, reasons(plain)), rule
        for name, event in plain.ends.items():
            assert (ahead.ends[name].logprobs, ahead.ends[name].score) == (event.logprobs, event.score), rule
        assert prompt_logprobs(ahead) == prompt_logprobs(plain), rule
        stats = ahead.engine.stats()
        assert 0 < stats["steps_ahead_total"] < stats["steps_total"], rule


def test_rules_that_only_count_tokens_are_run_ahead_of(tiny_speech: ModelInfo) -> None:
    """As those of a Whisper checkpoint do: what it never says, how it begins, how it ends."""
    start = int(tiny_speech.config["decoder_start_token_id"])
    free = greedy(9, ignore_eos=False)
    rules: list[dict[str, Any]] = [
        {"suppress_tokens": tuple(range(5, 30)), "begin_suppress_tokens": tuple(range(30, 50))},
        {"prefix_allowed": ((7, 8, 9), (11,)), "begin_suppress_tokens": (12,)},
        {"forced_eos_token_id": 2, "logit_bias": {9: 8.0}},
        {"allowed_token_ids": (20, 21, 22, 40), "min_tokens": 9},
        {"suppress_tokens": tuple(range(tiny_speech.config["vocab_size"]))},
        {"logprobs": 2, "begin_suppress_tokens": (12,)},
    ]
    for rule in rules:
        for params in (msgspec.structs.replace(free, **rule), sampled(9, seed=3, n=2, ignore_eos=False, **rule)):
            job = Job("r", [start, 5], params, [("clip", AUDIO_FRAMES)])
            plain, ahead = run(plain_engine(tiny_speech), [job]), run(ahead_engine(tiny_speech), [job])
            assert (ahead.tokens, reasons(ahead)) == (plain.tokens, reasons(plain)), rule
            assert logprobs(ahead) == logprobs(plain), rule
            assert bool(logprobs(ahead)) == ("logprobs" in rule)
            assert ahead.engine.stats()["steps_ahead_total"] == ahead.engine.stats()["steps_total"] - 1, rule


def logprobs(driver: Driver) -> list[Any]:
    told = [event for event in driver.events if isinstance(event, Tokens)]
    return sorted((one.index, one.offset, *one.logprobs) for one in told if one.logprobs)


def prompt_logprobs(driver: Driver) -> list[Any]:
    return [event.prompt_logprobs for event in driver.events if isinstance(event, Tokens) and event.prompt_logprobs]


def test_a_sequence_that_ends_unforeseen_costs_one_token_and_tells_nothing_of_it(tiny_llama: ModelInfo) -> None:
    jobs = [text("a", 6, greedy(12)), text("b", 9, sampled(12, n=2)), text("c", 4, greedy(12))]
    free = run(plain_engine(tiny_llama), jobs).tokens
    stops = tuple({free["a", 0][4], free["b", 1][2]})
    jobs = [replace(job, params=msgspec.structs.replace(job.params, stop_token_ids=stops)) for job in jobs]
    plain, ahead = run(plain_engine(tiny_llama), jobs), run(ahead_engine(tiny_llama), jobs)
    assert (ahead.tokens, reasons(ahead)) == (plain.tokens, reasons(plain))
    stopped = [name for name, reason in reasons(plain).items() if reason == "stop"]
    early = [name for name in stopped if len(plain.tokens[name]) < 12]
    assert {("a", 0), ("b", 1)} <= set(early)
    assert ahead.engine.stats()["surplus_tokens_total"] == len(early)
    assert ahead.engine.stats()["generated_tokens_total"] == plain.engine.stats()["generated_tokens_total"]


def test_no_step_is_launched_for_a_sequence_that_is_known_to_end(tiny_llama: ModelInfo) -> None:
    job = text("a", 6, greedy(5))
    plain, ahead = run(plain_engine(tiny_llama), [job]), run(ahead_engine(tiny_llama), [job])
    assert ahead.engine.stats()["steps_total"] == plain.engine.stats()["steps_total"] == 5
    assert ahead.engine.stats()["steps_ahead_total"] == 4
    short = {"max_model_len": 10}
    plain, ahead = (run(make(tiny_llama, **short), [job]) for make in (plain_engine, ahead_engine))
    assert ahead.tokens == plain.tokens
    assert len(ahead.tokens["a", 0]) == 4
    assert ahead.engine.stats()["steps_total"] == 4


def test_a_step_in_flight_is_work_even_where_nobody_waits_for_it(tiny_llama: ModelInfo) -> None:
    engine = ahead_engine(tiny_llama)
    driver = Driver(engine)
    driver.add(text("a", 6, greedy()))
    driver.step()
    assert engine.loop.in_flight
    assert not driver.tokens  # launched, not known
    engine.abort("a")
    assert engine.is_empty()
    assert engine.has_work()
    driver.finish()
    assert not engine.loop.in_flight
    assert not driver.tokens
    assert engine.stats()["surplus_tokens_total"] == 1


def test_tokens_of_an_aborted_request_are_not_those_of_the_next_one_with_its_name(tiny_llama: ModelInfo) -> None:
    engine = ahead_engine(tiny_llama)
    driver = Driver(engine)
    driver.add(text("a", 6, greedy()))
    for _ in range(3):
        driver.step()
    engine.abort("a")
    driver.tokens.clear()
    again = replace(text("other", 11, sampled(6)), name="a")
    driver.add(again)
    assert driver.finish() == run(plain_engine(tiny_llama), [again]).tokens


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_sequence_stopped_in_flight_leaves_its_siblings_alone(tiny_llama: ModelInfo, index: int) -> None:
    job = text("a", 6, sampled(10, n=3))
    expected = run(plain_engine(tiny_llama), [job]).tokens
    driver = Driver(ahead_engine(tiny_llama))
    driver.add(job)
    driver.step_to_token(4, "a", 2)
    driver.engine.stop_sequence("a", index)
    tokens = driver.finish()
    assert tokens["a", index] == expected["a", index][:4]
    assert all(tokens["a", other] == expected["a", other] for other in {0, 1, 2} - {index})
    assert driver.engine.stats()["surplus_tokens_total"] == 1


def test_the_prefix_cache_finds_the_same_after_both_loops(tiny_llama: ModelInfo) -> None:
    """Only blocks of known tokens have names: what follows on an answer finds as much of it."""
    first = [text(f"t{length}", length, greedy(9)) for length in (5, 6, 7, 8)]
    hits = {}
    for make in (plain_engine, ahead_engine):
        driver = Driver(make(tiny_llama))
        for job in first:
            driver.add(job)
        driver.finish()
        for job in first:
            driver.add(
                replace(job, name=f"{job.name} again", token_ids=[*job.token_ids, *driver.tokens[job.name, 0], 9])
            )
            driver.finish()
        cached = {name: event.num_cached_tokens for name, event in driver.ends.items()}
        hits[make] = driver.tokens, cached
    assert hits[ahead_engine] == hits[plain_engine]
    assert all(cached > 8 for (name, _), cached in hits[ahead_engine][1].items() if "again" in name)


def test_one_who_goes_first_gets_the_blocks_of_one_that_never_waits(tiny_llama: ModelInfo) -> None:
    """Its tokens are always in flight: but for the scheduler's holding back, it could not be preempted."""
    engine = ahead_engine(tiny_llama, 8)
    driver = Driver(engine)
    late, urgent = text("late", 9, greedy(20)), text("urgent", 14, greedy(3), priority=-1)
    driver.add(late)
    driver.step_to_token(9, "late")
    driver.add(urgent)
    driver.step_while(lambda: ("urgent", 0) not in driver.ends)
    assert ("late", 0) not in driver.ends
    assert engine.stats()["preemptions_total"] == 1
    expected = run(plain_engine(tiny_llama), [late, urgent]).tokens
    assert driver.finish() == expected


def test_keys_and_values_from_elsewhere_get_the_blocks_of_one_that_never_waits(tiny_llama: ModelInfo) -> None:
    """Room is reserved for them between two steps, while the tokens of one of them are in flight."""
    pair = Pair(ahead_engine(tiny_llama), ahead_engine(tiny_llama, 10))
    late, urgent = text("late", 9, greedy(25), priority=1), text("urgent", 22, greedy(3))
    pair.receiver.add(late)
    pair.receiver.step_to_token(8, "late")
    pair.add(urgent)
    while ("urgent", 0) not in pair.receiver.ends:
        assert pair.step()
    assert ("late", 0) not in pair.receiver.ends
    assert pair.receiver.engine.stats()["preemptions_total"] == 1
    assert pair.finish() == run(plain_engine(tiny_llama), [late, urgent]).tokens


def test_what_outgrows_the_whole_pool_ends_where_it_does_in_the_plain_loop(tiny_llama: ModelInfo) -> None:
    jobs = [text("a", 6, sampled(30, n=3)), text("b", 5, greedy(40))]
    plain, ahead = (run(make(tiny_llama, 11), jobs) for make in (plain_engine, ahead_engine))
    assert (ahead.tokens, reasons(ahead)) == (plain.tokens, reasons(plain))
    assert any(len(tokens) < 30 for tokens in plain.tokens.values())


def test_an_offer_that_comes_late_finds_a_full_sequence_in_order(tiny_vision: ModelInfo) -> None:
    """Its last token is in flight: a request as long as the context is refused, one that has got there is not."""
    placeholder = tiny_vision.placeholder_token_id or 0
    job = Job("p", [5, placeholder, 6], greedy(40), [("cat", 6)])
    expected = run(plain_engine(tiny_vision, max_model_len=20), [job]).tokens
    driver = Driver(ahead_engine(tiny_vision, max_model_len=20))
    driver.add(job)
    while not driver.engine.is_empty():
        driver.step()
        if not driver.engine.is_empty():
            driver.offer("p", 0)
    driver.finish()
    assert not driver.failures
    assert driver.tokens == expected


def test_a_step_that_could_not_be_launched_is_launched_again(
    tiny_llama: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = text("a", 6, sampled(8, n=2))
    engine = ahead_engine(tiny_llama)
    driver, launch = Driver(engine), engine.runner.run
    driver.add(job)
    for _ in range(3):
        driver.step()

    def fail(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "run", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            driver.step()
    assert engine.loop.in_flight  # the step before it has lost nothing
    assert engine.runner.run == launch
    assert driver.finish() == run(plain_engine(tiny_llama), [job]).tokens


def test_a_request_that_goes_on_elsewhere_goes_on_with_the_same_tokens(tiny_llama: ModelInfo) -> None:
    """What was told is handed on; what was in flight is not, and is drawn again."""
    job = text("a", 6, sampled(12, n=2))
    driver = Driver(ahead_engine(tiny_llama))
    driver.add(job)
    driver.step_to_token(5, "a", 1)
    told = driver.tokens
    going_on = replace(job, resumed=[Resumed(index, told["a", index]) for index in (0, 1)])
    rest = run(ahead_engine(tiny_llama), [going_on]).tokens
    expected = run(plain_engine(tiny_llama), [job]).tokens
    assert {name: told[name] + rest[name] for name in told} == expected


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_vision", "tiny_speech"])
def test_prefill_and_decode_apart_say_the_same(model: str, request: pytest.FixtureRequest) -> None:
    info: ModelInfo = request.getfixturevalue(model)
    name = {"tiny_llama": "several sequences", "tiny_vision": "pictures", "tiny_speech": "speech"}[model]
    jobs = WORKLOADS[name].jobs(info)
    pair = Pair(ahead_engine(info, max_num_batched_tokens=6), ahead_engine(info, WORKLOADS[name].num_blocks + 12))
    for job in jobs:
        pair.add(job)
    assert pair.finish() == run(plain_engine(info), jobs, watch=False).tokens
    assert pair.receiver.engine.stats()["steps_ahead_total"] > 0


def test_a_stop_string_found_while_the_next_step_runs_cuts_the_same_text(tiny_llama: ModelInfo) -> None:
    prompts = [{"prompt_token_ids": text_tokens(seed, 6)} for seed in range(3)]
    options = {"kv_cache_bytes": 2**20, "encoder_cache_bytes": 2**20, "swap_bytes": 0, "block_size": 4}
    plain = LLM(tiny_llama.folder, async_scheduling=False, **options)
    free = plain.generate(prompts, greedy(16, n=1))
    stops = tuple({one.outputs[0].text[4:7] for one in free})
    texts = {}
    for llm in (plain, LLM(tiny_llama.folder, async_scheduling=True, **options)):
        for params in (greedy(16, stop=stops), sampled(16, n=2, stop=stops)):
            ended = llm.generate(prompts, params)
            texts.setdefault(llm is plain, []).append(
                [(one.text, one.finish_reason, one.token_ids) for output in ended for one in output.outputs]
            )
        llm.decoder.check_integrity()
    assert texts[False] == texts[True]
    assert any(reason == "stop" for _, reason, _ in texts[True][0])


def never_told_ahead_of_time(engine: DecoderEngine) -> None:
    """Unknown tokens are at most the newest one of each sequence between two steps, and none has a name yet."""
    for request in engine.state.requests.values():
        for sequence in request.sequences:
            assert UNKNOWN_TOKEN not in sequence.token_ids[:-1]
            assert len(sequence.hashes) * engine.config.block_size <= sequence.num_known_tokens


@st.composite
def operations(draw: st.DrawFn) -> list[tuple[str, int]]:
    kinds = ["add", "add", "add", "abort", "stop", "preempt", "step", "step", "step"]
    return [(draw(st.sampled_from(kinds)), draw(st.integers(0, 9))) for _ in range(draw(st.integers(5, 40)))]


def some_job(number: int, kind: int) -> Job:
    length = 3 + kind
    params = [greedy(9), sampled(8, n=2), sampled(6, top_k=5), greedy(7, repetition_penalty=1.2), sampled(9, n=3)]
    chosen = greedy(5, beam_width=2) if kind == 9 else params[kind % 5]
    # Half of them begin alike: they find blocks of each other.
    return Job(f"j{number}", text_tokens(kind % 2, length), chosen, priority=kind % 3)


@given(operations(), st.sampled_from(["swap", "recompute"]))
@settings(max_examples=15, derandomize=True, suppress_health_check=list(HealthCheck))
def test_whatever_happens_in_flight_the_books_add_up_and_the_tokens_are_the_same(
    tiny_llama: ModelInfo, steps: list[tuple[str, int]], policy: str
) -> None:
    driver = Driver(ahead_engine(tiny_llama, 16, preemption=policy, max_num_batched_tokens=12))
    engine = driver.engine
    jobs: list[Job] = []
    stopped: set[tuple[str, int]] = set()
    for kind, value in steps:
        if kind == "add":
            jobs.append(some_job(len(jobs), value))
            driver.add(jobs[-1])
        elif kind == "step":
            driver.step()
        elif kind == "preempt":
            settled = [request for request in engine.scheduler.running if not request.has_unknown_tokens]
            if settled:
                engine.scheduler.preempt(settled[value % len(settled)])
        elif kind == "abort" and jobs:
            name = jobs[value % len(jobs)].name
            stopped |= {(name, index) for index in range(3)}
            engine.abort(name)
        elif kind == "stop" and driver.tokens:  # by what was told, as for a stop string
            told = sorted(driver.tokens)[value % len(driver.tokens)]
            stopped.add(told)
            engine.stop_sequence(*told)
        engine.check_integrity()
        never_told_ahead_of_time(engine)
    driver.finish()
    assert not driver.failures
    for job in jobs:
        for name, expected in alone(tiny_llama, job).items():
            got = driver.tokens.get(name, [])
            assert got == expected[: len(got)]
            assert name in stopped or got == expected


_alone: dict[tuple[str, str], Generated] = {}
_engines: list[DecoderEngine] = []


def alone(info: ModelInfo, job: Job) -> Generated:
    """What the plain loop gives for a job, with nobody beside it; its name does not matter."""
    key = str(job.token_ids), str(job.params)
    if key not in _alone:
        if not _engines:
            _engines.append(plain_engine(info, prefix_caching=False))
        [engine] = _engines
        _alone[key] = run(engine, [job], watch=False).tokens
    return {(job.name, index): tokens for (_, index), tokens in _alone[key].items()}
