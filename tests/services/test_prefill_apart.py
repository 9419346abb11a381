"""Prefill apart from decode: two workers, a real broker, and the tokens of one process."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import zmq.asyncio
from redis.asyncio import Redis

from common.sampling_params import SamplingParams
from engine.llm import LLM
from tests.services.apart import Apart, apart, question

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
    for number, sampling in enumerate(
        (
            SamplingParams(max_tokens=6, temperature=0.0),
            SamplingParams(max_tokens=6, temperature=1.0, seed=3, n=3, ignore_eos=True, presence_penalty=0.5),
        )
    ):
        await workers.generate(f"r{number}", prompt, sampling)
        assert await workers.tokens(f"r{number}") == reference(llm, prompt, sampling)
        ended = await workers.prefilled(f"r{number}")
        assert ended.error is None
    stats = await workers.counts(workers.decode)
    assert stats["recomputed_tokens_total"] == 0
    assert workers.decode.tally("handoffs")["granted"] >= 1
