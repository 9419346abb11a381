"""Several sequences of one request: each is what a request of its own would be, and resumed ones go on as they were."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from common.messages import Failed, Generate, Resumed, Tokens
from common.model_info import ModelInfo
from common.sampling_params import SamplingParams
from engine.core.decoder_engine import DecoderEngine
from engine.llm import LLM
from tests.engine.conftest import AUDIO_FRAMES
from tests.engine.driving import Driver, Generated, Job, greedy, make_engine, run, sampled, text, text_tokens


def clip_job(info: ModelInfo, name: str, **fields: int) -> Job:
    start = int(info.config["decoder_start_token_id"])
    return Job(name, [start, *text_tokens(3, 5)], sampled(10, **fields), [("clip", AUDIO_FRAMES)])


def singly(info: ModelInfo, job: Job) -> Generated:
    """The sequences of a request, each as a request of its own: number i has the seed of the whole plus i."""
    found: Generated = {}
    for index in range(job.params.n):
        seed = (job.params.seed or 0) + index
        alone = replace(job, params=job.params.__class__(**{**fields_of(job), "n": 1, "seed": seed}))
        found[job.name, index] = run(make_engine(info), [alone], watch=False).tokens[job.name, 0]
    return found


def fields_of(job: Job) -> dict[str, object]:
    return {name: getattr(job.params, name) for name in job.params.__struct_fields__}


@pytest.mark.parametrize("length", [3, 8, 9])
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 5}, {"prefix_caching": False}], ids=str)
def test_n_sequences_are_n_requests_with_the_following_seeds(
    tiny_llama: ModelInfo, length: int, options: dict[str, int]
) -> None:
    job = text("r", length, sampled(10, n=4, temperature=1.2, logprobs=0))
    neighbour = text("neighbour", 5, sampled(14, seed=99))
    driver = run(make_engine(tiny_llama, **options), [job, neighbour])
    expected = singly(tiny_llama, job)
    assert {key: tokens for key, tokens in driver.tokens.items() if key[0] == "r"} == expected
    assert len(set(map(tuple, expected.values()))) == 4
    last = [event for event in driver.events if isinstance(event, Tokens) and event.done]
    assert [event.request_id for event in last].count("r") == 1


def test_sequences_over_a_clip_share_its_keys_and_values(tiny_speech: ModelInfo) -> None:
    job = clip_job(tiny_speech, "r", n=5)
    engine = make_engine(tiny_speech)
    driver = Driver(engine)
    driver.add(job)
    driver.step_while(lambda: len(driver.tokens) < 5)
    assert len(engine.blocks.get_cross_block_table("r")) == -(-AUDIO_FRAMES // 4)
    # Six tokens of prompt: one full block for all, and the half full one that each will copy when it writes.
    assert engine.stats()["kv_blocks_used"] == -(-AUDIO_FRAMES // 4) + 2
    driver.step()
    assert engine.stats()["kv_blocks_used"] == -(-AUDIO_FRAMES // 4) + 1 + 5
    assert engine.stats()["block_copies_total"] == 4
    assert driver.finish() == singly(tiny_speech, job)
    assert driver.num_sent == 1


def test_the_prompt_is_computed_once_for_all(tiny_llama: ModelInfo) -> None:
    engine = make_engine(tiny_llama)
    driver = Driver(engine)
    driver.add(text("r", 21, greedy(4, n=6)))
    seen = []
    while not engine.is_empty():
        driver.step()
        seen.append(engine.stats()["last_step_tokens"])
    assert seen == [21, 6, 6, 6]
    assert engine.stats()["forks_total"] == 5


def test_a_sequence_that_ends_gives_its_blocks_back_at_once(tiny_llama: ModelInfo) -> None:
    job = text("r", 9, sampled(30, n=4, temperature=1.5, seed=2))
    whole = run(make_engine(tiny_llama), [job], watch=False).tokens
    stop = whole["r", 2][6]  # ends that one after 7 tokens at most
    params = job.params.__class__(**{**fields_of(job), "stop_token_ids": (stop,)})
    engine = make_engine(tiny_llama, prefix_caching=False)
    driver = Driver(engine)
    driver.add(replace(job, params=params))
    driver.step_while(lambda: not driver.ends)
    [ended] = driver.ends
    [request] = engine.scheduler.running
    assert ended[1] not in [one.index for one in request.sequences]
    assert engine.stats()["kv_blocks_used"] == len(engine.blocks.held_blocks(request.sequence_ids))
    driver.finish()
    lengths = {index: len(tokens) for (_, index), tokens in driver.tokens.items()}
    assert len(set(lengths.values())) > 1
    for (name, index), tokens in whole.items():
        cut = tokens.index(stop) + 1 if stop in tokens else len(tokens)
        assert driver.tokens[name, index] == tokens[:cut]
        assert driver.ends[name, index].finish_reason == ("stop" if stop in tokens else "length")
    assert [event.done for event in driver.ends.values()].count(True) == 1


def test_stop_strings_end_each_sequence_on_its_own(tiny_llama: ModelInfo) -> None:
    llm = LLM(tiny_llama.folder)
    params = sampled(24, n=4, temperature=1.5, seed=3)
    [free] = llm.generate([text_tokens(1, 6)], params)
    needle = free.outputs[1].text[5:7]
    assert "\N{REPLACEMENT CHARACTER}" not in needle
    fields = {name: getattr(params, name) for name in params.__struct_fields__}
    [stopped] = llm.generate([text_tokens(1, 6)], params.__class__(**{**fields, "stop": (needle,)}))
    assert [one.index for one in stopped.outputs] == [0, 1, 2, 3]
    for before, after in zip(free.outputs, stopped.outputs, strict=True):
        assert after.text == before.text.split(needle)[0]
        assert after.finish_reason == ("stop" if needle in before.text else "length")
        assert before.token_ids[: len(after.token_ids)] == after.token_ids
    assert stopped.outputs[1].finish_reason == "stop"
    assert llm.decoder.is_empty()
    llm.decoder.check_integrity()


# --- taken over from another instance


def resume(info: ModelInfo, job: Job, known: dict[int, list[int]], **options: int) -> Driver:
    """Another engine goes on with what is left of a job; returns what it adds."""
    rest = replace(job, resumed=[Resumed(index, tokens) for index, tokens in known.items()])
    return run(make_engine(info, **options), [rest, text("neighbour", 7, greedy(9))])


@pytest.mark.parametrize("num_blocks", [None, 14], ids=["roomy", "tight"])
@pytest.mark.parametrize("kept", [(5,), (0,), (5, 5, 5), (2, 7, 4), (0, 0, 0)], ids=str)
def test_resumed_sequences_go_on_as_if_nothing_had_happened(
    tiny_llama: ModelInfo, kept: tuple[int, ...], num_blocks: int | None
) -> None:
    """Of three sampled sequences, the last ones still ran; they had got `kept` tokens far."""
    job = text("r", 9, sampled(12, n=3, temperature=1.2, repetition_penalty=1.3))
    whole = run(make_engine(tiny_llama), [job], watch=False).tokens
    known = {3 - len(kept) + i: whole["r", 3 - len(kept) + i][:count] for i, count in enumerate(kept)}
    driver = resume(tiny_llama, job, known, **({} if num_blocks is None else {"num_blocks": num_blocks}))
    assert not driver.failures
    for index, tokens in known.items():
        assert tokens + driver.tokens["r", index] == whole["r", index]
        first = next(event for event in driver.events if isinstance(event, Tokens) and event.index == index)
        assert first.offset == len(tokens) or first.request_id == "neighbour"
    assert {index for name, index in driver.tokens if name == "r"} == set(known)


@pytest.mark.parametrize("num_blocks", [None, 6], ids=["roomy", "tight"])
def test_a_resumed_sequence_without_tokens_starts_where_the_prompt_fills_its_blocks(
    tiny_llama: ModelInfo, num_blocks: int | None
) -> None:
    job = text("r", 8, sampled(8, n=2, temperature=1.2))
    whole = run(make_engine(tiny_llama), [job], watch=False).tokens
    known = {0: whole["r", 0][:3], 1: []}
    driver = resume(tiny_llama, job, known, **({} if num_blocks is None else {"num_blocks": num_blocks}))
    assert {index: tokens + driver.tokens["r", index] for index, tokens in known.items()} == {
        index: whole["r", index] for index in known
    }


@pytest.mark.parametrize("policy", ["recompute", "swap", "auto"])
def test_resumed_sequences_that_share_too_little_for_the_pool_begin_anew(tiny_llama: ModelInfo, policy: str) -> None:
    """Those without tokens compute the last block of the prompt each; with tokens, they share it."""
    job = text("r", 16, sampled(4, n=4))
    whole = run(make_engine(tiny_llama), [job], watch=False).tokens
    engine = make_engine(tiny_llama, 8, preemption=policy, swap_bytes=2**21)
    driver = run(engine, [replace(job, resumed=[Resumed(0, whole["r", 0][:1]), *(Resumed(i, []) for i in (1, 2, 3))])])
    assert driver.tokens == {(name, index): tokens[index == 0 :] for (name, index), tokens in whole.items()}
    assert engine.stats()["preemptions_total"] == 1


def test_a_picture_in_the_block_that_a_sequence_without_tokens_computes_is_asked_for(tiny_vision: ModelInfo) -> None:
    """The first sequence, which has tokens, would find the block in the prefix cache."""
    token_ids = [*text_tokens(1, 2), tiny_vision.placeholder_token_id or 0, *text_tokens(3, 2)]
    job = Job("r", token_ids, sampled(12, n=2), [("cat", 4)])
    engine = make_engine(tiny_vision)
    whole = run(engine, [job]).tokens
    engine.cache.reserve("other", engine.cache.capacity_bytes, ("other", 0))  # the encoder's output is gone
    engine.cache.release("other", ("other", 0))
    driver = Driver(engine)
    driver.add(replace(job, resumed=[Resumed(0, whole["r", 0][:6]), Resumed(1, [])]))
    assert driver.finish() == {("r", 0): whole["r", 0][6:], ("r", 1): whole["r", 1]}


def test_resumed_sequences_over_a_clip(tiny_speech: ModelInfo) -> None:
    job = clip_job(tiny_speech, "r", n=3)
    whole = run(make_engine(tiny_speech), [job], watch=False).tokens
    rest = replace(job, resumed=[Resumed(0, whole["r", 0][:4]), Resumed(2, whole["r", 2][:6])])
    driver = run(make_engine(tiny_speech, max_num_batched_tokens=4), [rest])
    for index, count in [(0, 4), (2, 6)]:
        assert whole["r", index] == whole["r", index][:count] + driver.tokens["r", index]


def test_resumed_sequences_after_a_picture(tiny_vision: ModelInfo) -> None:
    """What follows a picture is known when the picture is; so is what had been generated."""
    token_ids = [*text_tokens(1, 3), tiny_vision.placeholder_token_id or 0, *text_tokens(2, 4)]
    job = Job("r", token_ids, sampled(10, n=2), [("cat", 6)])
    whole = run(make_engine(tiny_vision), [job], watch=False).tokens
    rest = replace(job, resumed=[Resumed(index, whole["r", index][: 3 + index]) for index in range(2)])
    driver = Driver(make_engine(tiny_vision))
    driver.add(rest, offer=False)
    driver.step()
    driver.offer("r", 0)
    driver.finish()
    for index in range(2):
        assert whole["r", index] == whole["r", index][: 3 + index] + driver.tokens["r", index]


@pytest.mark.parametrize(("num_blocks", "max_model_len"), [(8, 512), (60, 30)])
def test_resumed_sequences_that_cannot_run_here_are_refused(
    tiny_llama: ModelInfo, num_blocks: int, max_model_len: int
) -> None:
    """Another instance may have had a larger pool or context: the request must neither hang nor break the engine."""
    job = text("r", 9, sampled(60, n=2), resumed=[Resumed(0, text_tokens(1, 25)), Resumed(1, text_tokens(2, 25))])
    driver = run(make_engine(tiny_llama, num_blocks, max_model_len=max_model_len), [job])
    assert driver.failures["r"].error.code == "context_length_exceeded"
    assert driver.count(Failed) == 1


@pytest.mark.parametrize("length", [3, 8, 9])
def test_the_log_probabilities_of_a_prompt_are_told_once_even_if_it_is_computed_again(
    tiny_llama: ModelInfo, length: int
) -> None:
    engine = make_engine(tiny_llama, preemption="recompute")
    driver = Driver(engine)
    driver.add(text("r", length, sampled(8, n=2, prompt_logprobs=1)))
    driver.step_while(lambda: len(driver.tokens) < 2)
    engine.scheduler.preempt(engine.scheduler.running[0])
    driver.finish()
    told = [event.prompt_logprobs for event in driver.events if isinstance(event, Tokens)]
    assert [len(logprobs) for logprobs in told if logprobs] == [length]


@pytest.mark.parametrize("ahead", [False, True])
def test_the_log_probabilities_of_a_prompt_are_told_once_of_resumed_sequences(
    tiny_llama: ModelInfo, *, ahead: bool
) -> None:
    """The rows of a sibling may be selected before the tokens in flight are told, and with them the prompt's."""
    job = text("r", 9, sampled(12, n=2, prompt_logprobs=1))
    whole = run(make_engine(tiny_llama), [job], watch=False).tokens
    known = {0: whole["r", 0][:6], 1: whole["r", 1][:3]}
    driver = resume(tiny_llama, job, known, max_num_batched_tokens=9, async_scheduling=ahead)
    assert not driver.failures
    assert {index: tokens + driver.tokens["r", index] for index, tokens in known.items()} == {
        index: whole["r", index] for index in known
    }
    told = [event.prompt_logprobs for event in driver.events if isinstance(event, Tokens)]
    assert [len(logprobs) for logprobs in told if logprobs] == [9]


@pytest.mark.parametrize(
    "fields",
    [{"allowed_token_ids": (7,), "bad_words_ids": ((7,),)}, {"length_penalty": -5.0, "max_tokens": 80}],
    ids=str,
)
def test_beams_none_of_which_can_end_fail_and_leave_nothing_behind(
    tiny_llama: ModelInfo, fields: dict[str, Any]
) -> None:
    driver = run(make_engine(tiny_llama), [text("r", 5, greedy(**{"beam_width": 2, **fields}))])
    assert "no beam could end" in driver.failures["r"].error.message


def test_beams_whose_forced_tokens_exceed_the_context_fail(tiny_llama: ModelInfo) -> None:
    engine = make_engine(tiny_llama, max_model_len=32)
    params = greedy(beam_width=2, prefix_allowed=((7,), (8,)))
    driver = run(engine, [text("r", 31, params), text("neighbour", 30, params)])
    assert driver.failures["r"].error.code == "context_length_exceeded"
    assert list(driver.failures) == ["r"]


def test_beams_may_end_with_every_token(tiny_llama: ModelInfo) -> None:
    engine = make_engine(tiny_llama)
    ends = tuple(range(engine.runner.spec.vocab_size))
    driver = run(engine, [text("r", 5, greedy(n=2, beam_width=2, stop_token_ids=ends))])
    assert [len(tokens) for tokens in driver.tokens.values()] == [1, 1]


def test_a_picture_that_only_the_first_sequence_finds_in_the_cache_is_asked_for(tiny_vision: ModelInfo) -> None:
    """It stands in a block that the prompt does not fill, and that the first sequence had filled with its tokens."""
    token_ids = [*text_tokens(1, 4), tiny_vision.placeholder_token_id or 0, *text_tokens(3, 2)]
    job = Job("r", token_ids, sampled(30, n=2), [("cat", 8)])
    engine = make_engine(tiny_vision, block_size=16)
    whole = run(engine, [job]).tokens
    engine.cache.reserve("other", engine.cache.capacity_bytes, ("other", 0))  # the encoder's output is gone
    engine.cache.release("other", ("other", 0))
    driver = Driver(engine)
    driver.add(replace(job, resumed=[Resumed(index, whole["r", index][:20]) for index in range(2)]))
    assert driver.finish() == {key: tokens[20:] for key, tokens in whole.items()}


@pytest.mark.parametrize("ends", [False, True])
def test_a_beam_ends_by_its_length_where_its_last_token_only_looks_like_an_end(
    tiny_llama: ModelInfo, *, ends: bool
) -> None:
    [end] = tiny_llama.eos_token_ids
    params = greedy(1, beam_width=2, n=2, allowed_token_ids=(end, end + 1), stop_token_ids=(end,) * ends)
    driver = run(make_engine(tiny_llama), [text("r", 5, params)])
    reasons = {driver.tokens[key][-1]: event.finish_reason for key, event in driver.ends.items()}
    assert reasons == {end: "stop" if ends else "length", end + 1: "length"}


def moved_with_a_picture(info: ModelInfo, params: SamplingParams) -> tuple[Job, list[int]]:
    """A request of two sequences from another worker, its picture at token 4, and what the second one comes to."""
    placeholder = info.placeholder_token_id
    assert placeholder is not None
    prompt = [*text_tokens(1, 4), placeholder, *text_tokens(3, 30)]
    job = Job("b", prompt, params, [("picture", 8)], resumed=[Resumed(0, [7] * 5), Resumed(1, [9])])
    alone = replace(job, resumed=job.resumed[1:])
    return job, run(make_engine(info, prefix_caching=False), [alone]).tokens["b", 1]


@pytest.mark.parametrize("num_cached_after", [0, 8])
def test_a_sequence_whose_sibling_had_the_prompt_from_the_cache_and_ends_goes_on(
    tiny_vision: ModelInfo, num_cached_after: int
) -> None:
    """The picture is found in the prefix cache, the first sequence ends with its next token, and the second one has
    no blocks yet: it has to begin for itself."""
    job, expected = moved_with_a_picture(tiny_vision, greedy(6, n=2))
    engine = make_engine(tiny_vision)
    driver = run(engine, [Job("a", job.token_ids[: 5 + num_cached_after], greedy(2), job.media)])
    engine.cache.reserve("other", engine.cache.capacity_bytes, ("other", 0))  # the encoder's output is gone
    engine.cache.release("other", ("other", 0))
    driver.add(job)
    assert driver.finish()["b", 1] == expected


def test_a_sequence_whose_sibling_is_stopped_on_the_host_asks_for_the_picture_again(tiny_vision: ModelInfo) -> None:
    """The picture was found in the prefix cache, and has left it when the sequence without blocks begins."""
    job, expected = moved_with_a_picture(tiny_vision, greedy(16, n=2))
    engine = make_engine(tiny_vision, preemption="swap", max_num_batched_tokens=8)
    driver = run(engine, [Job("a", job.token_ids[:5], greedy(2), job.media)])
    engine.cache.reserve("other", engine.cache.capacity_bytes, ("other", 0))  # the encoder's output is gone
    engine.cache.release("other", ("other", 0))
    driver.add(job)
    driver.step_while(lambda: not engine.scheduler.running)
    engine.scheduler.preempt(engine.scheduler.running[0])
    assert engine.blocks.is_swapped("b")
    engine.stop_sequence("b", 0)
    engine.blocks.allocate(-1, engine.blocks.num_free * 4)  # the prefix is gone, too
    engine.blocks.free(-1)
    assert driver.finish()["b", 1] == expected


def picture_engine(info: ModelInfo, num_rows: int, **options: Any) -> DecoderEngine:
    """An engine whose encoder cache holds so many rows, and that computes preempted requests again."""
    size = num_rows * 64 * 4
    return make_engine(info, preemption="recompute", prefix_caching=False, encoder_cache_bytes=size, **options)


def two_pictures(info: ModelInfo, between: int, params: SamplingParams) -> Job:
    """Two pictures of eight rows; a cache for one of them has to be given from the one to the other."""
    picture = info.placeholder_token_id or 0
    token_ids = [*text_tokens(1, 3), picture, *text_tokens(2, between), picture, *text_tokens(3, 6)]
    return Job("r", token_ids, params, [("cat", 8), ("dog", 8)])


@pytest.mark.parametrize("between", [0, 3])
def test_resumed_sequences_pass_one_picture_after_the_other(tiny_vision: ModelInfo, between: int) -> None:
    job = two_pictures(tiny_vision, between, sampled(10, n=2))
    whole = run(make_engine(tiny_vision), [job]).tokens
    resumed = [Resumed(index, whole["r", index][: 3 + index]) for index in range(2)]
    driver = run(picture_engine(tiny_vision, 8), [replace(job, resumed=resumed)])
    for one in resumed:
        assert one.token_ids + driver.tokens["r", one.index] == whole["r", one.index]


@pytest.mark.parametrize("beams", [False, True])
@pytest.mark.parametrize("between", [0, 3])
def test_the_engine_rests_while_the_picture_of_several_sequences_is_on_its_way(
    tiny_vision: ModelInfo, monkeypatch: pytest.MonkeyPatch, between: int, *, beams: bool
) -> None:
    job = two_pictures(tiny_vision, between, greedy(8, n=2, beam_width=1 + beams))
    whole = run(make_engine(tiny_vision), [job]).tokens
    engine = picture_engine(tiny_vision, 8)
    driver = Driver(engine)
    if beams:
        driver.add(job)
        driver.step_while(lambda: len(engine.state.requests["r"].sequences) < 2)
        engine.scheduler.preempt(engine.scheduler.running[0])
        engine.input_receiver.update(engine.scheduler.pop_changed())
    else:
        driver.add(replace(job, resumed=[Resumed(index, whole["r", index][:2]) for index in range(2)]))
    deliver, late = engine.deliver, []

    def deliver_the_first(name: str, input_id: int, *rest: Any) -> None:
        late.append((name, input_id, *rest)) if input_id else deliver(name, input_id, *rest)

    monkeypatch.setattr(engine, "deliver", deliver_the_first)
    driver.step_while(engine.has_work)
    assert engine.scheduler.running
    deliver(*late[0])
    assert driver.finish() == (whole if beams else {key: tokens[2:] for key, tokens in whole.items()})


@pytest.mark.parametrize("between", [0, 3])
def test_preempted_beams_pass_one_picture_after_the_other(tiny_vision: ModelInfo, between: int) -> None:
    job = two_pictures(tiny_vision, between, greedy(8, n=2, beam_width=2))
    whole = run(make_engine(tiny_vision), [job]).tokens
    engine = picture_engine(tiny_vision, 8)
    driver = Driver(engine)
    driver.add(job)
    driver.step_while(lambda: len(engine.state.requests["r"].sequences) < 2)
    driver.step()
    engine.scheduler.preempt(engine.scheduler.running[0])
    engine.input_receiver.update(engine.scheduler.pop_changed())
    assert driver.finish() == whole


def test_what_breaks_over_one_request_does_not_reach_the_others(
    tiny_llama: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    neighbour = text("neighbour", 5, greedy(8))
    alone = run(make_engine(tiny_llama), [neighbour]).tokens

    def broken(*_: object) -> None:
        raise ZeroDivisionError("beams")

    monkeypatch.setattr("engine.sampling.beam.BeamSearch.step", broken)
    driver = Driver(make_engine(tiny_llama))
    driver.add(neighbour)
    driver.engine.add_request(Generate("beams", text_tokens(1, 6), [], greedy(8, beam_width=2)))
    driver.step_while(lambda: not driver.engine.is_empty())
    failed = [event for event in driver.events if isinstance(event, Failed)]
    assert [(event.request_id, event.error.code) for event in failed] == [("beams", "internal_error")]
    assert {key: tokens for key, tokens in driver.tokens.items() if key[0] == "neighbour"} == alone
