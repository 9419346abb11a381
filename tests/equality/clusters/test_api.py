"""What the API gives of a cluster is what `LLM` gives: several choices, beams, log-probabilities, constrained output;
and a decoder that is killed in the middle changes none of it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from common.model_info import BUNDLED
from common.sampling_params import SamplingParams
from engine.llm import LLM, RequestOutput
from tests.equality.served import Served, serve
from tests.proxy.sample_media import data_url
from tests.services.cluster import sign

pytestmark = pytest.mark.cluster
QUESTION = "Which colours do you know, and what do they stand for?"
SAMPLED = {"n": 3, "temperature": 1.0, "seed": 11, "max_tokens": 24}
"""With `ignore_eos`: the bundled model would rather say one word."""


@pytest.fixture(scope="module")
def served(broker_url: str) -> Iterator[Served]:
    with serve(BUNDLED / "signpost", broker_url, "api", topology="1e2pd", kv_cache_bytes=64 * 2**20) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("signpost", kv_cache_bytes=64 * 2**20)


async def _chat(served: Served, content: Any = QUESTION, extra: dict[str, Any] | None = None, **fields: Any) -> Any:
    async with served.client() as client:
        create: Any = client.chat.completions.create
        messages = [{"role": "user", "content": content}]
        extra_body = {"return_token_ids": True, **(extra or {})}
        return await create(model=served.info.name, messages=messages, extra_body=extra_body, **fields)


def _expected(llm: LLM, **sampling: Any) -> RequestOutput:
    return llm.chat([{"role": "user", "content": QUESTION}], SamplingParams(**sampling))[0]


async def test_sampled_choices_equal_those_of_llm(served: Served, llm: LLM) -> None:
    answer = await _chat(served, extra={"ignore_eos": True}, **SAMPLED)
    expected = _expected(llm, **SAMPLED, ignore_eos=True)
    assert [choice.token_ids for choice in answer.choices] == [one.token_ids for one in expected.outputs]
    assert [choice.message.content for choice in answer.choices] == [one.text for one in expected.outputs]
    assert len({tuple(choice.token_ids) for choice in answer.choices}) == 3
    await served.wait_until_nothing_is_held()


async def test_rules_and_penalties_equal_those_of_llm(served: Served, llm: LLM) -> None:
    rules = {"repetition_penalty": 1.2, "min_tokens": 8, "min_p": 0.01, "top_k": 20}
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.5}
    answer = await _chat(served, extra=rules, logit_bias={"50": 5}, **penalties, **SAMPLED)
    expected = _expected(llm, **SAMPLED, **rules, **penalties, logit_bias={50: 5.0})
    assert [choice.token_ids for choice in answer.choices] == [one.token_ids for one in expected.outputs]


async def test_beams_equal_those_of_llm(served: Served, llm: LLM) -> None:
    fields = {"use_beam_search": True, "best_of": 4, "length_penalty": 0.7}
    answer = await _chat(served, n=2, max_tokens=12, extra=fields)
    expected = _expected(llm, n=2, beam_width=4, length_penalty=0.7, max_tokens=12, temperature=0.0)
    assert [choice.token_ids for choice in answer.choices] == [one.token_ids for one in expected.outputs]
    assert [choice.score for choice in answer.choices] == pytest.approx([one.score for one in expected.outputs])
    await served.wait_until_nothing_is_held()


async def test_log_probabilities_equal_those_of_llm(served: Served, llm: LLM) -> None:
    answer = await _chat(served, logprobs=True, top_logprobs=2, temperature=0, max_tokens=8)
    (expected,) = _expected(llm, logprobs=2, temperature=0.0, max_tokens=8).outputs
    content = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in content] == pytest.approx([e.logprob for e in expected.logprobs], abs=1e-4)
    for told, entry in zip(content, expected.logprobs, strict=True):
        assert [top.logprob for top in told.top_logprobs] == pytest.approx([lp for _, lp in entry.top], abs=1e-4)


async def test_a_prompt_that_is_echoed_has_its_log_probabilities(served: Served, llm: LLM) -> None:
    ids = llm.text.encode("the red sign says stop")
    (expected,) = llm.generate({"prompt_token_ids": ids}, SamplingParams(prompt_logprobs=1, max_tokens=1))
    async with served.client() as client:
        create: Any = client.completions.create
        answer = await create(model=served.info.name, prompt=ids, echo=True, logprobs=1, max_tokens=0)
    logprobs = answer.choices[0].logprobs.token_logprobs
    assert logprobs[0] is None
    known = [entry.logprob for entry in expected.prompt_logprobs if entry is not None]
    assert logprobs[1:] == pytest.approx(known, abs=1e-4)
    assert "".join(answer.choices[0].logprobs.tokens) == answer.choices[0].text


async def test_a_prompt_with_a_picture_has_its_log_probabilities(served: Served, llm: LLM) -> None:
    """The cluster computes what is before the picture while that is still encoded, and its size is not known."""
    picture, text = sign("red"), {"type": "text", "text": "What does it say?"}
    message = {"role": "user", "content": [{"type": "image", "image": picture}, text]}
    [expected] = llm.chat([message], SamplingParams(prompt_logprobs=0, max_tokens=1))
    content = [{"type": "image_url", "image_url": {"url": data_url(picture)}}, text]
    answer = await _chat(served, content, {"prompt_logprobs": 0}, max_tokens=1)
    found = [None if one is None else next(iter(one.values()))["logprob"] for one in answer.prompt_logprobs]
    wanted = [None if one is None else one.logprob for one in expected.prompt_logprobs]
    assert [one is None for one in found] == [one is None for one in wanted]
    assert [one for one in found if one] == pytest.approx([one for one in wanted if one], abs=1e-4)


async def test_output_follows_a_schema(served: Served) -> None:
    schema = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
    strict = {**schema, "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "sign", "schema": strict, "strict": True}}
    answer = await _chat(served, response_format=form, n=2, seed=2, max_tokens=30)
    for choice in answer.choices:
        assert json.loads(choice.message.content)["colour"] in ("red", "blue")
    chosen = await _chat(served, extra={"guided_choice": ["certainly", "never"]}, max_tokens=50)
    assert chosen.choices[0].message.content in ("certainly", "never")


async def test_a_grammar_that_is_none_is_the_clients_fault(served: Served) -> None:
    for extra, param in (({"guided_regex": "(["}, "guided_regex"), ({"guided_grammar": "start: ("}, "guided_grammar")):
        with pytest.raises(openai.BadRequestError) as caught:
            await _chat(served, extra=extra)
        assert caught.value.param == param


async def test_more_sequences_than_fit_are_refused_by_name(served: Served) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await _chat(served, n=128)
    assert caught.value.param == "n"


async def test_what_was_computed_before_is_counted_as_cached(served: Served) -> None:
    long = "Tell me about the colours of all the signs that there are. " * 8
    counts = [(await _chat(served, long, max_tokens=2)).usage for _ in range(4)]
    assert counts[0].prompt_tokens > 64
    assert max(one.prompt_tokens_details.cached_tokens for one in counts[2:]) >= 64


async def test_a_stop_string_ends_one_choice_and_frees_what_it_held(served: Served, llm: LLM) -> None:
    first = _expected(llm, **SAMPLED, ignore_eos=True).outputs[0]
    stop = first.text[len(first.text) // 3 :][:4]
    answer = await _chat(served, stop=[stop], extra={"ignore_eos": True}, **SAMPLED)
    assert answer.choices[0].message.content == first.text[: first.text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    await served.wait_until_nothing_is_held()


async def test_a_killed_decoder_changes_no_draw(served: Served) -> None:
    """Pictures, a seed, three choices: the stream goes on from the other decoder, token for token."""
    content = [
        {"type": "image_url", "image_url": {"url": data_url(sign("red"))}},
        {"type": "text", "text": "What colour is the sign?"},
    ]
    fields = {**SAMPLED, "max_tokens": 400}
    undisturbed = await _chat(served, content, extra={"ignore_eos": True}, **fields)
    told: dict[int, list[int]] = {0: [], 1: [], 2: []}
    async with served.client() as client:
        create: Any = client.chat.completions.create
        extra = {"ignore_eos": True, "return_token_ids": True}
        messages = [{"role": "user", "content": content}]
        victim = ""
        async for chunk in await create(
            model=served.info.name, messages=messages, stream=True, extra_body=extra, **fields
        ):
            for choice in chunk.choices:
                told[choice.index] += choice.token_ids
            if not victim and min(map(len, told.values())) >= 3:
                victim = await asyncio.to_thread(_kill_the_busy_decoder, served)
    assert victim
    assert list(told.values()) == [choice.token_ids for choice in undisturbed.choices]


def _kill_the_busy_decoder(served: Served) -> str:
    for name in ("pd0", "pd1"):
        child = served.cluster.instances[name].child
        if served.gauges(name)["requests_outstanding"]:
            assert child is not None
            os.kill(child.pid, signal.SIGKILL)
            return name
    raise AssertionError("nobody is at work any more: generate more tokens")
