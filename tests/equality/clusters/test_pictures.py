"""The bundled model as a cluster whose decoder has room for four pictures: many at once, and nothing goes wrong."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from common.model_info import BUNDLED, load_model_info
from common.sampling_params import SamplingParams
from common.text.processor import TextProcessor
from engine.llm import LLM, Prompt
from tests.equality.cases import MAX_TOKENS as LIMITS
from tests.equality.cases import Case, CasesOf
from tests.equality.media import data_url
from tests.equality.runs import answer_all, expected_of, strip
from tests.equality.served import Served, serve
from tests.eventually import eventually
from tests.media_files import encoded
from tools.signpost import scenes

pytestmark = pytest.mark.cluster
MAX_TOKENS = LIMITS["signpost"]
SIZE = (140, 112)
PICTURE_BYTES = 20 * 256 * 4
"""Encoder output of a picture of that size: 20 tokens of 256 floats."""
BUDGET = 4 * PICTURE_BYTES


@pytest.fixture(scope="module")
def served(broker_url: str) -> Iterator[Served]:
    with serve(BUNDLED / "signpost", broker_url, "signpost", encoder_cache_bytes=BUDGET) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("signpost")


def make_case(rng: random.Random, num_pictures: int, kind: str) -> Case:
    """One question about pictures of equal size, never seen before; what is right is for `LLM` to say."""
    return case_about([scenes.render(rng, SIZE, "test") for _ in range(num_pictures)], kind)


def case_about(drawn: list[scenes.Scene], kind: str) -> Case:
    images = [scene.image for scene in drawn]
    asked = {"type": "text", "text": scenes.QUESTIONS[kind][0]}
    text = TextProcessor(load_model_info("signpost"))
    prompt = text.render_chat([{"role": "user", "content": [*({"type": "image"} for _ in images), asked]}])
    parts = [*({"type": "image_url", "image_url": {"url": data_url(image)}} for image in images), asked]
    messages = [{"role": "user", "content": parts}]
    return Case(prompt, [], [encoded(image) for image in images], http={"messages": messages})


async def assert_equal_to_llm(served: Served, llm: LLM, cases: list[Case]) -> list[str]:
    """All at once through the cluster, each answer equal to the one-process run's, and nothing left behind.

    Returns the answers.
    """
    prompts: list[Prompt] = [
        {"prompt_token_ids": case.prompt, "multi_modal_data": {"image": case.media}} for case in cases
    ]
    right = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
    answers = await served.answer_all(cases, MAX_TOKENS)
    assert [answer.token_ids for answer in answers] == [
        strip(llm.info, output.outputs[0].token_ids) for output in right
    ]
    assert [answer.text for answer in answers] == [output.outputs[0].text for output in right]
    assert [answer.num_tokens for answer in answers] == [len(output.outputs[0].token_ids) for output in right]
    assert [answer.num_prompt_tokens for answer in answers] == [output.num_prompt_tokens for output in right]
    await served.wait_until_nothing_is_held()
    return [answer.text for answer in answers]


async def test_the_bundled_model_answers_as_under_transformers(served: Served, llm: LLM, cases_of: CasesOf) -> None:
    cases = cases_of("signpost")
    assert answer_all(llm, cases, MAX_TOKENS) == expected_of(cases)
    for one_by_one in (False, True):
        answers = await served.answer_all(cases, MAX_TOKENS, one_by_one=one_by_one)
        assert [answer.token_ids for answer in answers] == expected_of(cases)
        assert [answer.text for answer in answers] == [llm.text.decode(case.expected) for case in cases]
    await served.wait_until_nothing_is_held()


async def test_64_pictures_at_once_share_a_budget_of_four(served: Served, llm: LLM) -> None:
    rng = random.Random(64)
    kinds = [scenes.KINDS[number % len(scenes.KINDS)] for number in range(64)]
    drawn = [scenes.render(rng, SIZE, "test", faces=(scenes.BUILT_IN,)) for _ in kinds]
    stored = served.gauges("pd0")["inputs_stored_total"]
    texts = await assert_equal_to_llm(
        served, llm, [case_about([scene], kind) for scene, kind in zip(drawn, kinds, strict=True)]
    )
    right = sum(text == scene.answers[kind] for text, scene, kind in zip(texts, drawn, kinds, strict=True))
    assert right >= 58, f"{right} of 64 answers are true; the model alone is right in 98 of 100"
    decoder = served.gauges("pd0")
    assert decoder["inputs_stored_total"] - stored >= 64, "every picture came by a handoff"
    assert decoder["encoder_cache_bytes_capacity"] == BUDGET
    assert BUDGET - PICTURE_BYTES < decoder["encoder_cache_bytes_peak"] <= BUDGET
    assert decoder["encoder_computations"] == 0, "a prefill-decode worker never computes an encoder"


async def test_requests_with_more_pictures_than_the_budget_holds_take_turns(served: Served, llm: LLM) -> None:
    rng = random.Random(6)
    await assert_equal_to_llm(served, llm, [make_case(rng, 6, scenes.KINDS[number % 4]) for number in range(10)])
    assert served.gauges("pd0")["encoder_cache_bytes_peak"] <= BUDGET


async def test_clients_that_leave_and_pictures_that_are_broken_take_nothing_from_the_others(
    served: Served, llm: LLM
) -> None:
    rng = random.Random(7)
    good, left = ([make_case(rng, 1, "colour") for _ in range(8)] for _ in range(2))
    broken = make_case(rng, 1, "text")
    broken.http["messages"][0]["content"][0]["image_url"]["url"] = "data:image/png;base64,aGVsbG8="
    async with served.client() as client:
        leaving = [asyncio.create_task(served.answer(client, case, MAX_TOKENS)) for case in left]
        refused = asyncio.create_task(served.answer(client, broken, MAX_TOKENS))
        staying = asyncio.create_task(assert_equal_to_llm(served, llm, good))
        await asyncio.wait(leaving, return_when=asyncio.FIRST_COMPLETED)
        for task in leaving:
            task.cancel()
        with pytest.raises(openai.BadRequestError):
            await refused
        await staying


async def test_every_request_has_a_timeline_from_proxy_to_last_token(served: Served) -> None:
    async with served.client() as client:
        answer = await served.answer(client, make_case(random.Random(8), 1, "shape"), MAX_TOKENS)

        stages = {"proxy", "preprocess", "grant", "encode", "handoff", "queue", "inputs", "prefill", "decode"}

        async def spans() -> list[dict[str, Any]]:
            timeline = await client.get(f"/requests/{answer.request_id}/timeline", cast_to=dict[str, Any])
            return list(timeline["spans"])

        async def is_whole() -> bool:
            """The encoder's spans come with the end of its handoff, which nobody's answer waits for."""
            return stages <= {span["stage"] for span in await spans()}

        await eventually(is_whole)
        assert all(span["start_s"] <= span["end_s"] for span in await spans())
