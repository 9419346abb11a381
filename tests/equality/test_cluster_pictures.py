"""The bundled model as a cluster whose decoder has room for four pictures: many at once, and nothing goes wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from common.model_info import BUNDLED, load_model_info
from common.sampling_params import SamplingParams
from common.text import TextProcessor
from engine.llm import LLM
from launch.signpost import scenes
from tests.equality.cases import MAX_TOKENS as LIMITS
from tests.equality.cases import Case
from tests.equality.media import data_url, png
from tests.equality.runs import answer_all, expected_of
from tests.equality.served import Served, serve

pytestmark = pytest.mark.cluster
MAX_TOKENS = LIMITS["signpost"]
SIZE = (140, 112)
PICTURE_BYTES = 20 * 256 * 4
"""Encoder output of a picture of that size: 20 tokens of 256 floats."""
NUM_REQUESTS = 64


@pytest.fixture(scope="module")
def served(broker_url: str) -> Iterator[Served]:
    with serve(BUNDLED / "signpost", broker_url, "signpost", encoder_cache_bytes=4 * PICTURE_BYTES) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("signpost")


@pytest.fixture(scope="module")
def burst(llm: LLM) -> list[Case]:
    """One question each about 64 different pictures; `LLM` says what is right."""
    text, rng, cases = TextProcessor(load_model_info("signpost")), random.Random(64), []
    for number in range(NUM_REQUESTS):
        image = scenes.render(rng, SIZE, "test").image
        question = scenes.QUESTIONS[scenes.KINDS[number % len(scenes.KINDS)]][0]
        prompt = text.render_chat(
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
        )
        parts = [{"type": "image_url", "image_url": {"url": data_url(image)}}, {"type": "text", "text": question}]
        cases.append(Case(prompt, [], [png(image)], http={"messages": [{"role": "user", "content": parts}]}))
    return cases


async def test_the_bundled_model_answers_as_under_transformers(
    served: Served, llm: LLM, cases_of: Callable[[str], list[Case]]
) -> None:
    cases = cases_of("signpost")
    assert answer_all(llm, cases, MAX_TOKENS) == expected_of(cases)
    for one_by_one in (False, True):
        answers = await served.answer_all(cases, MAX_TOKENS, one_by_one=one_by_one)
        assert [answer.text for answer in answers] == [llm.text.decode(case.expected) for case in cases]
    await served.wait_until_nothing_is_held()


async def test_64_pictures_at_once_share_a_budget_of_four(served: Served, llm: LLM, burst: list[Case]) -> None:
    prompts = [{"prompt_token_ids": case.prompt, "multi_modal_data": {"image": case.media}} for case in burst]
    right = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
    before = served.gauges("pd0")["inputs_stored_total"]

    answers = await served.answer_all(burst, MAX_TOKENS)

    assert [answer.text for answer in answers] == [output.outputs[0].text for output in right]
    assert [answer.num_tokens for answer in answers] == [len(output.outputs[0].token_ids) for output in right]
    assert [answer.num_prompt_tokens for answer in answers] == [output.num_prompt_tokens for output in right]
    decoder = served.gauges("pd0")
    assert decoder["inputs_stored_total"] - before >= NUM_REQUESTS, "every picture came by a handoff"
    assert decoder["encoder_cache_bytes_capacity"] == 4 * PICTURE_BYTES
    assert 3 * PICTURE_BYTES < decoder["encoder_cache_bytes_peak"] <= 4 * PICTURE_BYTES
    assert decoder["encoder_computations"] == 0, "a prefill-decode worker never computes an encoder"
    await served.wait_until_nothing_is_held()


async def test_every_request_has_a_timeline_from_proxy_to_last_token(served: Served, burst: list[Case]) -> None:
    async with served.client() as client:
        answer = await served.answer(client, burst[0], MAX_TOKENS)
        timeline = await client.get(f"/requests/{answer.request_id}/timeline", cast_to=dict[str, object])
    spans = timeline["spans"]
    assert isinstance(spans, list)
    stages = {span["stage"] for span in spans}
    assert {"proxy", "preprocess", "grant", "queue", "inputs", "prefill", "decode"} <= stages
    assert all(span["start_s"] <= span["end_s"] for span in spans)
