"""Prefill apart from decode: two workers, a real broker, and the tokens of one process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import zmq.asyncio
from redis.asyncio import Redis

from common.hashing import content_hash
from common.messages import Encode, Failed, Generate, InputSlot, Resumed, Tokens
from common.sampling_params import SamplingParams
from engine.llm import LLM
from services.roles.prefill import PrefillService
from tests.broker.transports.fake_cuda import FakeCuda
from tests.eventually import eventually
from tests.services.apart import Apart, apart, question
from tests.services.cluster import sign
from tests.services.inprocess import in_process

LONG = "Which colours does the sign have? " * 20


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("signpost", num_threads=1, kv_cache_bytes=16 * 2**20)


@pytest.fixture
async def workers(broker_url: str, redis: Redis, zmq_context: zmq.asyncio.Context) -> AsyncIterator[Apart]:
    async with apart(broker_url, redis, zmq_context) as running:
        yield running
    assert await redis.keys("*") == []


def reference(llm: LLM, prompt: list[int], sampling: SamplingParams) -> dict[int, list[int]]:
    [output] = llm.generate({"prompt_token_ids": prompt}, sampling)
    return {one.index: one.token_ids for one in output.outputs}


async def test_tokens_are_those_of_one_process_and_nothing_is_computed_twice(workers: Apart, llm: LLM) -> None:
    prompt = question(LONG)
    greedy = SamplingParams(max_tokens=6, temperature=0.0)
    drawn = SamplingParams(max_tokens=6, temperature=1.0, seed=3, n=3, ignore_eos=True, presence_penalty=0.5)
    for number, sampling in enumerate((greedy, drawn)):
        await workers.generate(f"r{number}", prompt, sampling)
        assert await workers.tokens(f"r{number}") == reference(llm, prompt, sampling)
        assert (await workers.prefilled(f"r{number}")).error is None
    prefilled, decoded = await workers.counts(workers.prefill), await workers.counts(workers.decode)
    assert decoded["recomputed_tokens_total"] == 0
    assert decoded["prefill_handoff_tokens_total"] + decoded["prefill_handoff_cached_tokens_total"] == 2 * (
        len(prompt) - 1
    )
    assert decoded["prefill_handoff_cached_tokens_total"] > 0  # the second prompt is the first one
    assert prefilled["generated_tokens_total"] == 0


async def test_a_prefill_worker_without_an_encoder_encodes_and_hands_on_what_it_has_made_of_a_picture(
    broker_url: str, redis: Redis, zmq_context: zmq.asyncio.Context, llm: LLM
) -> None:
    media, text, sampling = sign("blue"), "What colour is the sign?", SamplingParams(max_tokens=6, temperature=0.0)
    content = [{"type": "image", "image": media}, {"type": "text", "text": text}]
    [expected] = llm.chat([{"role": "user", "content": content}], sampling)
    prompt, digest = expected.prompt_token_ids, content_hash("image", media)
    slots = [InputSlot(0, "image", digest, llm.text.placeholder_indices(prompt, 1)[0])]
    async with apart(broker_url, redis, zmq_context, encoder_fallback=True) as workers:
        await workers.generate("r", prompt, sampling, inputs=slots)
        deadline_s = time.monotonic() + 20
        workers.prefill.proxy.send(Encode("r", 0, 0, "image", digest, media, "p0", deadline_s))
        assert await workers.tokens("r") == {0: expected.outputs[0].token_ids}
        assert workers.prefill.gauge("encoder_fallbacks_total") == 1
        decoded = await workers.counts(workers.decode)
        assert decoded["prefill_handoff_tokens_total"] == expected.num_prompt_tokens - 1
        assert decoded["recomputed_tokens_total"] == 0


async def test_a_resumed_request_goes_on_and_prompt_log_probabilities_come_from_the_prefill(
    workers: Apart, llm: LLM
) -> None:
    prompt = question("Which colours are there?")
    sampling = SamplingParams(max_tokens=10, temperature=1.0, seed=5, ignore_eos=True, prompt_logprobs=0)
    whole = reference(llm, prompt, sampling)[0]
    await workers.generate("r", prompt, sampling, resumed=[Resumed(0, whole[:4])])
    await workers.ended("r")
    messages = workers.decode.of(Tokens, "r")
    assert messages[0].offset == 4
    assert [token for message in messages for token in message.token_ids] == whole[4:]
    assert len((await workers.prefilled("r")).prompt_logprobs) == len(prompt)
    assert all(not message.prompt_logprobs for message in messages)


async def test_more_prompts_than_either_pool_holds_drain(
    broker_url: str, redis: Redis, zmq_context: zmq.asyncio.Context, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve prompts, where prefill and decode have room for about two each, of other block sizes.

    One part at a time is gathered: prefills that lost their blocks do not hold up those that have theirs.
    """
    monkeypatch.setattr("services.worker_process.open_cuda", lambda device: FakeCuda())
    monkeypatch.setattr("services.handoff.kv_sender.MAX_PENDING", 1)
    prompts = [question(f"{number} {LONG}") for number in range(12)]
    sampling = SamplingParams(max_tokens=4, temperature=0.0)
    token_bytes = await _token_bytes(broker_url, redis, zmq_context)
    engine = {"kv_cache_bytes": int(2.5 * len(prompts[-1]) * token_bytes), "prefix_caching": False}
    async with apart(
        broker_url, redis, zmq_context, prefill_engine=engine, decode_engine={**engine, "block_size": 8}
    ) as workers:
        for number, prompt in enumerate(prompts):
            await workers.generate(f"r{number}", prompt, sampling)
        answers = [await workers.tokens(f"r{number}") for number in range(len(prompts))]
        assert answers == [reference(llm, prompt, sampling) for prompt in prompts]
        assert (await workers.counts(workers.decode))["recomputed_tokens_total"] == 0


async def _token_bytes(broker_url: str, redis: Redis, context: zmq.asyncio.Context) -> float:
    """Bytes of the keys and values of one token."""
    async with in_process(broker_url, redis, context, PrefillService) as worker:
        stats = await worker.role.thread.call(lambda engine: engine.stats(), 5.0)
        return float(stats["kv_block_bytes"] / worker.shell._context.settings.engine.block_size)


async def test_aborts_at_any_stage_leave_nothing_on_either_side(workers: Apart) -> None:
    sampling = SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)
    for number in range(8):
        await workers.generate(f"r{number}", question(f"{number} {LONG}"), sampling)
    await eventually(lambda: bool(workers.decode.of(Tokens, "r0")), 20.0)
    for number in range(8):
        await workers.abort(f"r{number}")
    await eventually(workers.is_idle, 2.0)
    offers = workers.decode.role._receiver._offers
    await eventually(lambda: not offers)


async def test_a_broker_flushed_in_the_middle_loses_nothing(
    workers: Apart, llm: LLM, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.handoff.sender.REPEAT_S", 0.2)
    sampling = SamplingParams(max_tokens=4, temperature=0.0)
    prompts = [question(f"{number} {LONG}") for number in range(6)]
    for number, prompt in enumerate(prompts):
        await workers.generate(f"r{number}", prompt, sampling)
        await redis.flushall()
    await redis.flushall()
    answers = [await workers.tokens(f"r{number}") for number in range(len(prompts))]
    assert answers == [reference(llm, prompt, sampling) for prompt in prompts]


async def test_an_offer_waits_for_its_request(workers: Apart, llm: LLM) -> None:
    prompt, sampling = question("Which colour is the sign?"), SamplingParams(max_tokens=4, temperature=0.0)
    await workers.prefill_only("r", prompt, sampling)
    await eventually(lambda: workers.prefill.gauge("handoffs_open") == 1, 10.0)
    await workers.decode_only("r", prompt, sampling)
    assert await workers.tokens("r") == reference(llm, prompt, sampling)


async def test_the_decode_worker_takes_a_newer_attempt_for_an_older_one(workers: Apart, llm: LLM) -> None:
    prompt, sampling = question(LONG), SamplingParams(max_tokens=4, temperature=0.0)
    await workers.prefill_only("r", prompt, sampling)
    await workers.prefill_only("r", prompt, sampling, attempt=1)
    await workers.decode_only("r", prompt, sampling)
    assert await workers.tokens("r") == reference(llm, prompt, sampling)
    assert (await workers.prefilled("r")).attempt == 1


@pytest.mark.parametrize("which", ["prefill", "decode"])
async def test_a_drained_worker_loses_no_request(
    broker_url: str, redis: Redis, zmq_context: zmq.asyncio.Context, llm: LLM, which: str
) -> None:
    prompts = [question(f"{number} {LONG}") for number in range(4)]
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    async with apart(broker_url, redis, zmq_context) as workers:
        for number, prompt in enumerate(prompts):
            await workers.generate(f"r{number}", prompt, sampling)
        leaving = workers.prefill if which == "prefill" else workers.decode
        await eventually(lambda: leaving.gauge("requests_outstanding") > 0)
        await leaving.shell.drain()
        assert (await leaving.record()).draining
        answers = [await workers.tokens(f"r{number}") for number in range(len(prompts))]
        async with asyncio.timeout(10):
            assert await asyncio.shield(leaving.task) == 0
        assert answers == [reference(llm, prompt, sampling) for prompt in prompts]


async def test_a_decode_worker_takes_only_what_is_prefilled(workers: Apart) -> None:
    workers.decode.proxy.send(Generate("r", [1, 2], [], SamplingParams()))
    failed = await workers.decode.one(Failed, "r")
    assert failed.error.code == "invalid_request"
    assert failed.error.message.startswith("d0 is a decode worker: the prompt has to be prefilled elsewhere")
