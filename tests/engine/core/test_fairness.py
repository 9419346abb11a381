"""Who runs when: by priority, then first come, first served; everybody who can run does, and who cannot is told."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from common.messages import Failed, Tokens
from common.model_info import ModelInfo
from common.sampling_params import Grammar
from engine.runner.decoder import PromptRows
from engine.sampling.grammar import MAX_CACHED
from engine.scheduler.pace import MIN_TOKENS
from tests.engine.conftest import AUDIO_FRAMES
from tests.engine.driving import Driver, Job, greedy, make_engine, run, sampled, text, text_tokens


def first_tokens(driver: Driver) -> list[str]:
    """Request ids in the order in which they began to answer."""
    return list(dict.fromkeys(event.request_id for event in driver.events if isinstance(event, Tokens)))


def ended(driver: Driver) -> list[str]:
    return [event.request_id for event in driver.events if isinstance(event, Tokens) and event.done]


def test_first_come_first_served_within_a_priority(tiny_llama: ModelInfo) -> None:
    driver = run(make_engine(tiny_llama, max_num_seqs=1), [text(name, 6, greedy(3)) for name in "abcd"])
    assert ended(driver) == ["a", "b", "c", "d"]


def test_a_lower_priority_number_goes_first(tiny_llama: ModelInfo) -> None:
    priorities = {"a": 2, "b": 0, "c": 1, "d": 0, "e": -3}
    jobs = [text(name, 6, greedy(3), priority=priority) for name, priority in priorities.items()]
    driver = run(make_engine(tiny_llama, max_num_seqs=1), jobs)
    assert ended(driver) == ["e", "b", "d", "c", "a"]


@pytest.mark.parametrize("scarce", ["slots", "blocks"])
def test_an_urgent_request_takes_the_place_of_one_that_runs(tiny_llama: ModelInfo, scarce: str) -> None:
    """Whoever came last of the least urgent ones gives way, and says the same in the end."""
    options: dict[str, Any] = {"max_num_seqs": 2} if scarce == "slots" else {"num_blocks": 8}
    jobs = [text("a", 8, greedy(8)), text("b", 8, greedy(8))]
    expected = run(make_engine(tiny_llama), jobs, watch=False).tokens
    driver = Driver(make_engine(tiny_llama, **options))
    for job in jobs:
        driver.add(job)
    for _ in range(5):
        driver.step()
    assert [one.request_id for one in driver.engine.scheduler.running] == ["a", "b"]
    driver.add(text("urgent", 8, greedy(2), priority=-1))
    driver.finish()
    assert ended(driver) == ["urgent", "a", "b"]
    assert driver.engine.stats()["preemptions_total"] == 1
    assert {key: driver.tokens[key] for key in expected} == expected


@pytest.mark.parametrize("shared", ["tokens", "clip"])
def test_what_an_urgent_request_shares_with_one_that_would_make_way_is_no_room_for_it(
    shared: str, tiny_llama: ModelInfo, tiny_speech: ModelInfo
) -> None:
    """Freed blocks that it has to hold itself are not free for its other tokens: nobody makes way in vain."""
    num_cross = -(-AUDIO_FRAMES // 4) if shared == "clip" else 0
    info = tiny_speech if num_cross else tiny_llama
    begin = text_tokens(1, 1 if num_cross else 16)

    def job(name: str, length: int, max_tokens: int, priority: int) -> Job:
        tokens = begin + text_tokens(len(name), length - len(begin))
        return Job(name, tokens, greedy(max_tokens), [("clip", AUDIO_FRAMES)] if num_cross else [], priority)

    neighbour = replace(text("neighbour", 9, greedy(4)), media=[("other", AUDIO_FRAMES)] if num_cross else [])
    jobs = [job("low", 25, 4, 1), neighbour, job("urgent", 36, 2, 0)]
    expected = run(make_engine(info), jobs, watch=False).tokens
    driver = Driver(make_engine(info, 10 + 2 * num_cross))
    for one in jobs[:2]:
        driver.add(one)
    driver.step_while(lambda: len(driver.tokens) < 2)
    driver.add(jobs[2])
    driver.step()
    assert [one.request_id for one in driver.engine.scheduler.running] == ["neighbour", "low"]
    assert driver.finish() == expected
    assert driver.engine.stats()["preemptions_total"] == 0


def test_an_equal_never_takes_the_place_of_one_that_runs(tiny_llama: ModelInfo) -> None:
    driver = Driver(make_engine(tiny_llama, max_num_seqs=1))
    driver.add(text("a", 8, greedy(20)))
    driver.step()
    driver.add(text("b", 8, greedy(2)))
    driver.finish()
    assert ended(driver) == ["a", "b"]
    assert driver.engine.stats()["preemptions_total"] == 0


@pytest.mark.parametrize(
    ("job", "options"),
    [
        (text("long", 60, greedy(20)), {"num_blocks": 22}),
        (text("long", 60, greedy(20)), {"max_num_batched_tokens": 8, "max_num_seqs": 4}),
        (text("long", 20, sampled(20, n=6)), {"num_blocks": 36, "max_num_seqs": 6}),
        (text("long", 20, greedy(20, beam_width=6)), {"num_blocks": 36, "max_num_seqs": 6, "preemption": "swap"}),
    ],
    ids=["needs nearly all blocks", "needs many steps of prefill", "needs all slots", "beams, swapping"],
)
def test_a_stream_of_short_requests_starves_no_long_one(
    tiny_llama: ModelInfo, job: Job, options: dict[str, Any]
) -> None:
    """Three short requests arrive in every step, before it and after it, more than the engine can do."""
    expected = run(make_engine(tiny_llama), [job], watch=False).tokens
    driver = Driver(make_engine(tiny_llama, max_waiting=10_000, **options), watch=False)
    for step in range(150):
        for number in range(3):
            driver.add(text(f"short {step} {number}", 6, greedy(6)))
        if step == 4:
            driver.add(job)
        driver.step()
        if job.name in ended(driver):
            break
    assert job.name in ended(driver), f"not after {step} steps: {driver.engine.stats()}"
    assert {key: driver.tokens[key] for key in expected} == expected
    assert driver.engine.stats()["requests_waiting"] > 0  # the stream has not dried up


@pytest.mark.parametrize("priority", [0, -1], ids=["of equals", "of more urgent requests"])
def test_a_stream_of_long_prompts_does_not_stop_those_that_decode(tiny_llama: ModelInfo, priority: int) -> None:
    """Next tokens come first: every step gives each stream a token, whatever is prefilled beside them."""
    driver = Driver(make_engine(tiny_llama, max_num_batched_tokens=16), watch=False)
    driver.add(text("steady", 5, greedy(30)))
    driver.step()
    for step in range(29):
        driver.add(text(f"prompt {step}", 50, greedy(1), priority=priority))
        events = driver.step()
        assert "steady" in [event.request_id for event in events if isinstance(event, Tokens)]
        assert driver.engine.stats()["last_step_tokens"] <= 16
    assert "steady" in ended(driver)


@pytest.mark.parametrize(
    "params",
    [greedy(5), sampled(5, n=5), greedy(5, beam_width=5)],
    ids=["one sequence", "several", "beams"],
)
def test_what_can_never_fit_the_pool_is_refused_at_once(tiny_llama: ModelInfo, params: Any) -> None:
    """Eight blocks of 4: a prompt of 31 tokens and one more fit them alone, and three full ones with five sequences."""
    fits, too_long = (31, 32) if params.num_sequences == 1 else (15, 16)
    driver = Driver(make_engine(tiny_llama, 8))
    driver.add(text("too long", too_long, params))
    driver.add(text("neighbour", 5, greedy(3)))
    driver.add(text("fits", fits, params))
    driver.step()
    failure = driver.failures["too long"].error
    assert failure.code == "context_length_exceeded"
    assert "the whole pool holds 32" in failure.message
    driver.finish()
    assert set(ended(driver)) == {"neighbour", "fits"}


def test_a_grammar_that_cannot_be_compiled_again_ends_its_own_request(
    tiny_llama: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache has lost it behind others that wait, and the system has no thread to compile it."""
    driver = Driver(make_engine(tiny_llama))
    names = [f"r{number}" for number in range(MAX_CACHED + 1)]
    for number, name in enumerate(names):
        grammar = Grammar("regex", f"[a-f]{{{number + 3},100}}")
        driver.add(text(name, 5, greedy(3, grammar=grammar)))
    driver.add(text("free", 5, greedy(3)))

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", start)
    driver.finish()
    assert {name: failed.error.code for name, failed in driver.failures.items()} == {names[0]: "overloaded"}
    assert ended(driver) == [*names[1:], "free"]


def test_a_beam_search_that_ends_in_the_step_in_which_its_prompt_fails_is_told_once(
    tiny_llama: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(make_engine(tiny_llama))

    def fail(_: PromptRows) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(driver.engine.decoding, "_add_prompt_logprobs", fail)
    driver.add(text("beams", 5, greedy(1, beam_width=2, prompt_logprobs=1)))
    driver.add(text("neighbour", 5, greedy(3)))
    driver.finish()
    assert "out of memory" in driver.failures["beams"].error.message
    assert ended(driver) == ["neighbour"]


def test_prompts_beside_streams_are_computed_in_chunks_within_the_objective(tiny_llama: ModelInfo) -> None:
    """Alone a prompt takes one step; beside a stream as many as the objective, here an impossible one, demands."""
    jobs = [text("steady", 5, greedy(30)), text("prompt", 80, greedy(1))]
    expected = run(make_engine(tiny_llama), jobs, watch=False).tokens
    driver = Driver(make_engine(tiny_llama, itl_objective_ms=1e-6), watch=False)
    driver.add(text("alone", 80, greedy(1)))
    driver.step()
    assert driver.engine.stats()["last_step_tokens"] == 80
    driver.add(jobs[0])
    driver.step_to_token(2, "steady")
    driver.add(jobs[1])
    sizes = []
    while "prompt" not in ended(driver):
        driver.step()
        sizes.append(driver.engine.stats()["last_step_tokens"])
    assert sizes == [MIN_TOKENS + 1] * (80 // MIN_TOKENS)
    driver.finish()
    assert {key: driver.tokens[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("params", "limits", "param"),
    [
        (sampled(5, n=4), {"max_num_seqs": 3}, "n"),
        (greedy(5, beam_width=4), {"max_num_seqs": 3}, "beam_width"),
        (greedy(5, n=2, beam_width=9), {"max_num_batched_tokens": 8}, "beam_width"),
    ],
)
def test_more_sequences_than_can_run_at_once_are_refused(
    tiny_llama: ModelInfo, params: Any, limits: dict[str, Any], param: str
) -> None:
    driver = run(make_engine(tiny_llama, **limits), [text("many", 5, params), text("neighbour", 5, greedy(3))])
    failure = driver.failures["many"].error
    assert (failure.code, failure.param) == ("invalid_request", param)
    assert f"at most {next(iter(limits.values()))}" in failure.message
    assert ended(driver) == ["neighbour"]


def test_no_more_than_so_many_requests_wait_or_run(tiny_llama: ModelInfo) -> None:
    engine = make_engine(tiny_llama, max_num_seqs=2, max_waiting=3)
    driver = Driver(engine)
    for number in range(7):
        driver.add(text(f"r{number}", 5, greedy(4)))
    driver.step()
    assert [(name, one.error.code) for name, one in driver.failures.items()] == [
        ("r5", "overloaded"),
        ("r6", "overloaded"),
    ]
    assert (engine.stats()["requests_running"], engine.stats()["requests_waiting"]) == (2, 3)
    driver.step_while(lambda: "r0" not in ended(driver))
    driver.add(text("later", 5, greedy(4)))
    driver.finish()
    assert set(ended(driver)) == {"r0", "r1", "r2", "r3", "r4", "later"}


def test_sequences_count_against_the_limit_before_they_exist(tiny_llama: ModelInfo) -> None:
    """A request takes room for all its sequences when it begins: after the prompt there is no way back."""
    engine = make_engine(tiny_llama, max_num_seqs=5, max_num_batched_tokens=8)
    driver = Driver(engine)
    for name in "ab":
        driver.add(text(name, 20, sampled(6, n=3)))
    driver.add(text("c", 4, greedy(6)))
    most = 0
    while not engine.is_empty():
        driver.step()
        most = max(most, sum(len(one.sequences) for one in engine.scheduler.running))
    assert most <= 5
    assert first_tokens(driver) == ["a", "b", "c"]
    assert driver.engine.stats()["preemptions_total"] == 0


@pytest.mark.parametrize(
    ("text_length", "fields", "max_num_seqs", "images", "expected"),
    [
        (40, {}, 16, ["waits"], {"waits": 4, "text": 12}),
        (10, {}, 16, ["waits"], {"waits": 6, "text": 10}),
        (10, {}, 16, ["waits", "too"], {"waits": 6, "text": 10}),
        (40, {}, 16, ["runs", "too"], {"runs": 4, "text": 12}),
        (40, {"priority": 1}, 16, ["waits"], {"waits": 16}),
        (40, {}, 2, ["runs"], {"runs": 16}),
        (0, {}, 16, ["waits", "too"], {"waits": 16}),
    ],
    ids=["text", "little text", "two images", "one runs", "less urgent text", "text without a place", "no text"],
)
def test_prompts_of_text_need_not_wait_for_images_that_came_before(
    tiny_vision: ModelInfo,
    text_length: int,
    fields: dict[str, int],
    max_num_seqs: int,
    images: list[str],
    expected: dict[str, int],
) -> None:
    """Of the 16 tokens of the pace images share what text of their urgency leaves, and a quarter at least.

    The prompt of "runs" begins with a token of text, so that it has begun before its image comes.
    """
    engine = make_engine(tiny_vision, max_num_seqs=max_num_seqs)
    prompt = [tiny_vision.placeholder_token_id or 0, 9]
    jobs = [Job(name, [7] * (name == "runs") + prompt, greedy(4), [(name, 40)]) for name in images]
    texts = [text("text", text_length, greedy(4), **fields)] if text_length else []
    alone = run(make_engine(tiny_vision), [*jobs, *texts], watch=False).tokens
    driver = Driver(engine)
    driver.add(text("decodes", 4, greedy(30)))
    for job in jobs:
        driver.add(job, offer=False)
    driver.step_to_token(1, "decodes")
    before = {one.request_id: one.sequences[0].num_computed_tokens for one in engine.scheduler.running}
    engine.scheduler.pace = cast(Any, SimpleNamespace(observe=lambda *_: None, limit=lambda *_: 16, last_limit=16))
    for job in jobs:
        driver.offer(job.name, 0)
    driver.step_while(lambda: driver.num_sent < len(jobs))
    for job in texts:
        driver.add(job)
    driver.step()
    computed = {one.request_id: one.sequences[0].num_computed_tokens for one in engine.scheduler.running}
    new = {name: count - before.get(name, 0) for name, count in computed.items() if name != "decodes"}
    assert {name: count for name, count in new.items() if count} == expected
    driver.finish()
    assert {key: driver.tokens[key] for key in alone} == alone


def test_images_whose_first_rows_are_cached_take_nothing_from_the_prompts_that_wait(tiny_vision: ModelInfo) -> None:
    """The pace follows the number of tokens that could be computed: of these images none, until they are there."""
    engine = make_engine(tiny_vision, encoder_cache_bytes=43 * 64 * 4)
    placeholder, counted = tiny_vision.placeholder_token_id or 0, list[int]()
    for content in ("cat", "dog"):  # the second one takes the first one's place in the encoder cache
        run(engine, [Job(content, [placeholder, 9], greedy(2), [(content, 43)])])
    driver = Driver(engine)
    driver.add(text("decodes", 4, greedy(30)))
    driver.step_to_token(1, "decodes")
    driver.add(text("prompt", 90, greedy(1)))
    for number in range(3):
        driver.add(Job(f"question {number}", [placeholder, 10 + number], greedy(2), [("cat", 43)]))

    def limit(num_decodes: int, context: int, num_waiting: int) -> int:
        counted.append(num_waiting)
        return 16

    engine.scheduler.pace = cast(Any, SimpleNamespace(observe=lambda *_: None, limit=limit, last_limit=16))
    driver.step()
    assert counted == [90]
    driver.finish()


def test_an_answer_that_is_computed_again_does_not_yield_to_text(tiny_vision: ModelInfo) -> None:
    driver = Driver(make_engine(tiny_vision, preemption="recompute"))
    driver.add(Job("image", [tiny_vision.placeholder_token_id or 0, 9], greedy(9), [("picture", 40)]))
    [image] = driver.engine.scheduler.waiting
    assert image.yields_to_text
    driver.step_to_token(2, "image")
    driver.engine.scheduler.preempt(image)
    assert not image.yields_to_text
    driver.finish()


def test_a_prompt_runs_up_to_its_first_missing_picture_and_others_pass(tiny_vision: ModelInfo) -> None:
    """The second picture comes first; the prompt goes on when the first one has come."""
    placeholder = tiny_vision.placeholder_token_id or 0
    token_ids = [*text_tokens(1, 5), placeholder, *text_tokens(2, 3), placeholder, 9, 9]
    job = Job("waits", token_ids, greedy(4), [("first", 6), ("second", 4)])
    expected = run(make_engine(tiny_vision), [job], watch=False).tokens
    driver = Driver(make_engine(tiny_vision))
    driver.add(job, offer=False)
    driver.add(text("passes", 6, greedy(4)))
    driver.step()
    [waits] = [one for one in driver.engine.scheduler.running if one.request_id == "waits"]
    assert waits.sequences[0].num_computed_tokens == 5
    driver.offer("waits", 1)
    driver.step_while(lambda: driver.engine.has_work())
    assert ended(driver) == ["passes"]
    assert waits.sequences[0].num_computed_tokens == 5
    driver.offer("waits", 0)
    driver.finish()
    assert driver.tokens["waits", 0] == expected["waits", 0]
    assert driver.count(Failed) == 0
