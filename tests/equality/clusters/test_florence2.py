"""Florence-2 in a cluster: what a client asks beside the cases of the other files, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from common.sampling_params import SamplingParams
from engine.llm import LLM
from tests.equality.cases import MAX_TOKENS, Case, FolderOf
from tests.equality.media import data_url, picture
from tests.equality.runs import expected_of, prompt_of
from tests.equality.served import ANSWER_TIMEOUT_S, Served, serve

pytestmark = pytest.mark.cluster
PICTURE = {"type": "image_url", "image_url": {"url": data_url(picture(1))}}


@pytest.fixture(scope="module")
def served(folder_of: FolderOf, broker_url: str) -> Iterator[Served]:
    """Two encoders, and a decoder with small chunks."""
    options: dict[str, Any] = {"max_num_batched_tokens": 16, "block_size": 4, "encoder_cache_bytes": 128 * 64 * 4}
    with serve(folder_of("florence2"), broker_url, "florence2", topology="2e1pd", **options) as cluster:
        yield cluster


async def ask(served: Served, route: str, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, timeout=ANSWER_TIMEOUT_S) as client:
        return await client.post(f"{served.cluster.base_url}/v1/{route}", json={"temperature": 0, **body})


def turn(*parts: dict[str, Any] | str) -> list[dict[str, Any]]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": content}]


async def test_answers_equal_transformers_one_by_one_and_at_once(served: Served, cases: list[Case]) -> None:
    for one_by_one in (False, True):
        answers = await served.answer_all(cases, MAX_TOKENS["florence2"], one_by_one=one_by_one)
        assert [answer.token_ids for answer in answers] == expected_of(cases)
    await served.wait_until_nothing_is_held()


async def test_special_tokens_and_both_prompts_are_told_to_those_who_ask(served: Served, cases: list[Case]) -> None:
    llm = LLM(served.info.folder)
    texts = [llm.text.decode(case.expected, skip_special_tokens=False) for case in cases]
    case, text = next((case, text) for case, text in zip(cases, texts, strict=True) if "<loc_" in text)
    body = {**case.http.get("extra_body", {}), "skip_special_tokens": False, "return_prompts": True}
    response = await ask(served, "chat/completions", messages=case.http["messages"], max_tokens=24, **body)
    [choice], usage = response.json()["choices"], response.json()["usage"]
    params = SamplingParams(temperature=0, max_tokens=24)
    [output] = llm.generate([prompt_of(served.info, case)], params, return_prompts=True)
    assert choice["message"]["content"].removesuffix("</s>") == text
    assert choice["encoder_prompt_token_ids"] == output.encoder_prompt_token_ids == case.encoder_prompt
    assert choice["encoder_prompt"] == output.encoder_prompt
    assert (choice["decoder_prompt"], choice["decoder_prompt_token_ids"]) == (output.prompt, output.prompt_token_ids)
    assert usage["prompt_tokens"] == len(case.encoder_prompt or []) + len(case.prompt)


async def test_beams_and_responses_are_those_of_llm(served: Served) -> None:
    llm, prompt = LLM(served.info.folder), {"prompt": "<OD>", "multi_modal_data": {"image": picture(1)}}
    beams = {"use_beam_search": True, "n": 3, "return_token_ids": True}
    response = await ask(served, "chat/completions", messages=turn(PICTURE, "<OD>"), max_tokens=12, **beams)
    [expected] = llm.generate([prompt], SamplingParams(temperature=0, n=3, beam_width=3, max_tokens=12))  # type: ignore[list-item]
    found = [choice["token_ids"] for choice in response.json()["choices"]]
    assert found == [one.token_ids for one in expected.outputs]
    part = {"type": "input_image", "image_url": data_url(picture(1))}
    content = [part, {"type": "input_text", "text": "<OD>"}]
    response = await ask(served, "responses", input=[{"role": "user", "content": content}], max_output_tokens=24)
    [one] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=24))  # type: ignore[list-item]
    assert response.json()["output"][0]["content"][0]["text"] == one.outputs[0].text


@pytest.mark.parametrize(
    ("route", "body", "message", "param"),
    [
        ("chat/completions", {"messages": turn("<OD>")}, "with one image, .* not 0", "messages"),
        ("chat/completions", {"messages": turn(PICTURE, PICTURE, "<OD>")}, "with one image, .* not 2", "messages"),
        ("chat/completions", {"messages": turn(PICTURE, "<OD> x")}, "the task <OD> takes no other text", "messages"),
        ("chat/completions", {"messages": turn(PICTURE, "x" * 130)}, "takes at most 128", "messages"),
        ("chat/completions", {"messages": turn(PICTURE), "decoder_prompt": [5] * 128}, "too short", None),
        ("chat/completions", {"messages": turn(PICTURE), "truncate_prompt_tokens": 5}, "truncate", None),
        ("completions", {"prompt": "<OD>"}, "needs an image: use /v1/chat/completions", "model"),
    ],
)
async def test_what_cannot_be_served_is_a_clear_bad_request(
    served: Served, route: str, body: dict[str, Any], message: str, param: str | None
) -> None:
    response = await ask(served, route, **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert re.search(message, error["message"]), error
    assert param is None or error["param"] == param
    await served.wait_until_nothing_is_held()
