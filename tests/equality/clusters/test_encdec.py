"""BART, mBART and T5 in a cluster: encoder prompts travel as inputs, answers equal transformers and `LLM`."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from common.model_info import load_model_info
from common.sampling_params import SamplingParams
from engine.llm import LLM
from tests.equality.cases import MAX_TOKENS, Case, FolderOf
from tests.equality.runs import answer_all, expected_of, kv_bytes
from tests.equality.served import ANSWER_TIMEOUT_S, Served, serve

pytestmark = pytest.mark.cluster
BLOCK_SIZE = 8
NUM_BLOCKS = 30
"""Enough for the longest decoder prompt and encoder prompt together; never for all requests."""


@pytest.fixture(scope="module", params=("bart", "mbart", "t5"))
def served(request: pytest.FixtureRequest, folder_of: FolderOf, broker_url: str) -> Iterator[Served]:
    """Two encoders, and a decoder under pressure: small chunks, a KV cache too small for all requests at once."""
    folder = folder_of(request.param)
    kv_cache_bytes = kv_bytes(load_model_info(str(folder)), NUM_BLOCKS, BLOCK_SIZE)
    options = {"max_num_batched_tokens": 32, "block_size": BLOCK_SIZE, "kv_cache_bytes": kv_cache_bytes}
    options |= {"encoder_cache_bytes": 128 * 64 * 4}
    with serve(folder, broker_url, request.param, topology="2e1pd", **options) as cluster:  # type: ignore[arg-type]
        yield cluster


async def test_a_mixed_batch_equals_transformers_and_llm(served: Served, cases: list[Case]) -> None:
    max_tokens = MAX_TOKENS[served.prefix]
    llm = LLM(served.info.folder)
    assert answer_all(llm, cases, max_tokens) == expected_of(cases)
    answers = await served.answer_all(cases, max_tokens)
    assert [answer.token_ids for answer in answers] == expected_of(cases)
    assert [answer.text for answer in answers] == [llm.text.decode(case.expected) for case in cases]
    await served.wait_until_nothing_is_held()


async def test_arrivals_in_the_middle_of_decoding_change_nothing(served: Served, cases: list[Case]) -> None:
    max_tokens = MAX_TOKENS[served.prefix]
    staggered = await served.answer_all(cases, max_tokens, one_by_one=True)
    assert [answer.token_ids for answer in staggered] == expected_of(cases)
    await served.wait_until_nothing_is_held()


async def test_a_text_is_the_encoders_and_a_decoder_prompt_may_be_text_too(served: Served) -> None:
    llm, max_tokens = LLM(served.info.folder), 12
    pair = {"encoder_prompt": "The rain in spain", "decoder_prompt": "falls"}
    case = Case([], [], http={"prompt": "The rain in spain"})
    explicit = Case([], [], http={"prompt": "The rain in spain", "extra_body": {"decoder_prompt": "falls"}})
    async with served.client() as client:
        answers = [await served.answer(client, one, max_tokens) for one in (case, explicit)]
        body = {"encoder_prompt": "The rain in spain", "decoder_prompt": "falls", "return_prompts": True, "echo": True}
        echoed = await client.completions.create(
            model=served.info.name, prompt=None, temperature=0, max_tokens=max_tokens, extra_body=body
        )
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    outputs = llm.generate(["The rain in spain", pair], params, return_prompts=True)  # type: ignore[list-item]
    [choice], told = echoed.choices, outputs[1]
    assert choice.text == f"falls{told.outputs[0].text}"
    assert (choice.encoder_prompt, choice.decoder_prompt) == (told.encoder_prompt, told.prompt)  # type: ignore[attr-defined]
    assert choice.encoder_prompt_token_ids == told.encoder_prompt_token_ids  # type: ignore[attr-defined]
    assert choice.decoder_prompt_token_ids == told.prompt_token_ids  # type: ignore[attr-defined]
    assert [answer.text for answer in answers] == [output.outputs[0].text for output in outputs]
    assert answers[0].text != answers[1].text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": [5] * 129}, "has 129 tokens, the encoder of"),
        ({"prompt": [264]}, "outside the vocabulary of 264"),
        ({"prompt": "a", "decoder_prompt": [5] * 128}, "128"),
        ({"prompt": []}, "empty"),
    ],
    ids=str,
)
async def test_what_cannot_be_served_is_a_clear_bad_request(
    served: Served, fields: dict[str, object], message: str
) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=ANSWER_TIMEOUT_S) as client:
        body = {"model": served.info.name, "max_tokens": 4, **fields}
        response = await client.post(f"{served.cluster.base_url}/v1/completions", json=body)
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]
    await served.wait_until_nothing_is_held()
