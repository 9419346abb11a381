"""Several answers to one request: n, the best of more, beams, in one piece and as a stream."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from common.messages import Abort, Generate, StopSequence
from tests.proxy.conftest import eventually
from tests.proxy.sample_media import image_part, picture
from tests.proxy.streams import events, gather

ANSWERS = ["a red sign", "a blue sign with a circle", "green"]


async def _create(rig, path, **fields):
    if path == "chat":
        return await rig.chat(**fields)
    return await rig.client.completions.create(model=rig.model, prompt="say", **fields)


def _text(choice):
    return choice.text if hasattr(choice, "text") else choice.message.content


@pytest.mark.parametrize("path", ["chat", "completions"])
async def test_n_choices_come_from_one_request_to_the_worker(rig, path):
    decoder = rig.cluster.decoders[0]
    decoder.answer, decoder.num_cached_tokens = lambda message: ANSWERS, 3
    answer = await _create(rig, path, n=3)
    assert [(choice.index, _text(choice)) for choice in answer.choices] == list(enumerate(ANSWERS))
    (generate,) = decoder.of(Generate)
    assert generate.sampling.n == 3
    words = sum(len(rig.cluster.text.encode(text, add_special_tokens=False)) for text in ANSWERS)
    assert answer.usage.completion_tokens == words + 3
    assert answer.usage.prompt_tokens == len(generate.prompt_token_ids)
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


@pytest.mark.parametrize("path", ["chat", "completions"])
async def test_a_stream_tells_every_choice_by_its_index(rig, path):
    rig.cluster.decoders[0].answer = lambda message: ANSWERS
    stream = await _create(rig, path, n=3, stream=True)
    texts, ends = await gather(stream)
    assert texts == dict(enumerate(ANSWERS))
    assert ends == {0: "stop", 1: "stop", 2: "stop"}


async def test_every_choice_of_a_chat_begins_with_its_role(rig):
    rig.cluster.decoders[0].answer = lambda message: ANSWERS
    chunks = [chunk async for chunk in await rig.chat(n=3, stream=True)]
    first = {}
    for chunk in chunks:
        first.setdefault(chunk.choices[0].index, chunk.choices[0].delta.role)
    assert first == dict.fromkeys(range(3), "assistant")


async def test_several_prompts_with_several_choices_are_numbered_by_prompt(rig):
    decoder = rig.cluster.decoders[0]
    decoder.answer = lambda message: [f"{message.prompt_token_ids[0]} {name}" for name in "ab"]
    create = rig.client.completions.create
    answer = await create(model=rig.model, prompt=[[5], [6]], n=2)
    expected = ["5 a", "5 b", "6 a", "6 b"]
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    texts, _ = await gather(await create(model=rig.model, prompt=[[5], [6]], n=2, stream=True))
    assert texts == dict(enumerate(expected))
    assert answer.usage.prompt_tokens == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_its_own_choice_only(rig, stream):
    rig.cluster.decoders[0].answer = lambda message: ANSWERS
    answer = await rig.chat(n=3, stop=" blue", stream=stream)
    if stream:
        texts, ends = await gather(answer)
    else:
        texts = {choice.index: _text(choice) for choice in answer.choices}
        ends = {choice.index: choice.finish_reason for choice in answer.choices}
    assert texts == {0: "a red sign", 1: "a", 2: "green"}
    assert ends == dict.fromkeys(range(3), "stop")


async def test_the_worker_is_told_which_choice_needs_no_more(rig):
    decoder = rig.cluster.decoders[0]
    decoder.answer = lambda message: ["one two three", "four five six"]
    decoder.pause_after = 2 * len(rig.cluster.text.encode("one two", add_special_tokens=False)) + 1
    task = asyncio.create_task(rig.chat(n=2, stop=" two"))
    await eventually(lambda: bool(decoder.of(StopSequence)))
    (stop,) = decoder.of(StopSequence)
    assert (stop.request_id, stop.index) == (decoder.of(Generate)[0].request_id, 0)
    decoder.resume.set()
    assert [_text(choice) for choice in (await task).choices] == ["one", "four five six"]
    assert decoder.of(StopSequence) == [stop]


async def test_the_worker_is_told_to_stop_once_stop_strings_have_ended_every_choice(rig):
    decoder = rig.cluster.decoders[0]
    decoder.answer = lambda message: "one two three four five"
    decoder.pause_after = 2 * len(rig.cluster.text.encode("one two three four", add_special_tokens=False))
    answer = await rig.chat(n=2, stop=" three")
    assert [_text(choice) for choice in answer.choices] == ["one two"] * 2
    await eventually(lambda: bool(decoder.of(Abort)))  # a second one answers what was on its way meanwhile


async def test_stop_strings_count_only_after_min_tokens(rig):
    rig.cluster.decoders[0].answer = lambda message: "red red red red"
    count = len(rig.cluster.text.encode("red red red", add_special_tokens=False))
    answer = await rig.chat(stop=" red", max_tokens=50, extra_body={"min_tokens": count})
    assert _text(answer.choices[0]) == "red red red"


async def test_the_best_of_more_are_returned_the_best_first(monkeypatch, rig):
    decoder = rig.cluster.decoders[0]
    decoder.answer = lambda message: ANSWERS
    logprobs = {0: -2.0, 1: -0.5, 2: -1.0}
    own = decoder.messages

    def scored(message):
        return [
            msgspec.structs.replace(
                tokens,
                logprobs=[msgspec.structs.replace(one, logprob=logprobs[tokens.index]) for one in tokens.logprobs],
            )
            for tokens in own(message)
        ]

    monkeypatch.setattr(decoder, "messages", scored)
    answer = await rig.client.completions.create(model=rig.model, prompt="say", n=2, best_of=3)
    assert [choice.text for choice in answer.choices] == [ANSWERS[1], ANSWERS[2]]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].logprobs is None
    generate = decoder.of(Generate)[-1]
    assert (generate.sampling.n, generate.sampling.logprobs) == (3, 0)
    words = sum(len(rig.cluster.text.encode(text, add_special_tokens=False)) for text in ANSWERS)
    assert answer.usage.completion_tokens == words + 3


@pytest.mark.parametrize("stream", [False, True])
async def test_beams_come_with_their_scores(rig, stream):
    decoder = rig.cluster.decoders[0]
    decoder.answer = lambda message: ANSWERS
    fields = {"use_beam_search": True, "best_of": 5, "length_penalty": 0.5, "early_stopping": True}
    answer = await rig.chat(n=2, stream=stream, extra_body=fields)
    if stream:
        chunks = [chunk async for chunk in answer]
        ends = [choice for chunk in chunks for choice in chunk.choices if choice.finish_reason]
        assert [choice.delta.content for chunk in chunks for choice in chunk.choices if choice not in ends] == ANSWERS[
            :2
        ]
        assert [choice.score for choice in ends] == [-1.0, -2.0]
    else:
        assert [_text(choice) for choice in answer.choices] == ANSWERS[:2]
        assert [choice.score for choice in answer.choices] == [-1.0, -2.0]
    sampling = decoder.of(Generate)[-1].sampling
    assert (sampling.n, sampling.beam_width, sampling.temperature) == (2, 5, 0.0)
    assert (sampling.length_penalty, sampling.early_stopping) == (0.5, True)
    texts = await rig.client.completions.create(model=rig.model, prompt="say", n=2, stream=stream, extra_body=fields)
    choices = [choice async for chunk in texts for choice in chunk.choices] if stream else texts.choices
    assert [(choice.text, choice.score) for choice in choices] == [(ANSWERS[0], -1.0), (ANSWERS[1], -2.0)]


async def test_without_best_of_n_is_the_width_of_the_beam(rig):
    rig.cluster.decoders[0].answer = lambda message: ANSWERS
    await rig.chat(n=3, temperature=0, extra_body={"use_beam_search": True})
    sampling = rig.cluster.decoders[0].of(Generate)[-1].sampling
    assert (sampling.n, sampling.beam_width, sampling.length_penalty) == (3, 3, 1.0)


async def test_a_picture_is_encoded_once_for_all_choices(rig):
    await rig.chat([image_part(picture())], n=4)
    assert len(rig.cluster.encoders[0].received) == 1


async def test_usage_can_come_with_every_chunk(rig):
    rig.read_one_by_one()
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "x", "stream": True, "stream_options": options}
    chunks = events(await rig.http.post("/v1/completions", json=body))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] == 1
    assert chunks[-1]["choices"] == []
