"""transformers == `LLM` == a cluster of processes, for every family: the same cases through OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from common.model_info import load_model_info
from engine.llm import LLM
from tests.equality.cases import MAX_TOKENS, Case, FolderOf, timed_speech_cases
from tests.equality.references import Reference
from tests.equality.runs import answer_all, expected_of, kv_bytes
from tests.equality.served import Answer, Served, serve
from tools.soak.asks import WITHOUT_RULES

pytestmark = pytest.mark.cluster
FAMILIES = ("llama", "qwen2", pytest.param("qwen2_5_vl", marks=pytest.mark.smoke), "whisper")
AHEAD = ("qwen2", "whisper")
"""Clusters whose engines launch steps before the tokens of the last ones are known, as they do on CUDA."""
BLOCK_SIZE = 8
NUM_BLOCKS = {"llama": 17, "qwen2": 17, "qwen2_5_vl": 32, "whisper": 2 * -(-1500 // BLOCK_SIZE) + 5}
"""Enough for the longest request, or for two clips with their cross-attention; never for all."""
ENCODER_CACHE_BYTES = 1500 * 64 * 4
"""One clip, or thirty of the largest pictures."""


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest, folder_of: FolderOf, broker_url: str) -> Iterator[Served]:
    """A cluster under pressure: small chunks, and a KV cache too small for all requests at once."""
    folder = folder_of(request.param)
    kv_cache_bytes = kv_bytes(load_model_info(str(folder)), NUM_BLOCKS[request.param], BLOCK_SIZE)
    options = {"max_num_batched_tokens": 32, "block_size": BLOCK_SIZE, "kv_cache_bytes": kv_cache_bytes}
    options["async_scheduling"] = request.param in AHEAD
    with serve(folder, broker_url, request.param, encoder_cache_bytes=ENCODER_CACHE_BYTES, **options) as cluster:
        yield cluster


async def test_a_mixed_batch_equals_transformers_and_llm(served: Served, cases: list[Case]) -> None:
    max_tokens = MAX_TOKENS[served.prefix]
    llm = LLM(served.info.folder)
    assert answer_all(llm, cases, max_tokens) == expected_of(cases)
    answers = await served.answer_all(cases, max_tokens)
    assert [answer.token_ids for answer in answers] == expected_of(cases)
    assert [answer.text for answer in answers] == [_text(llm, case) for case in cases]
    if not served.info.is_encoder_decoder:  # a transcription in one piece does not tell
        assert [_end(answer) for answer in answers] == [_expected_end(case, max_tokens) for case in cases]
    if not served.info.is_encoder_decoder:  # clips come one at a time out of the encoder and may never meet
        for _ in range(4):  # whether all meet in the decoder at a time is chance
            if served.gauges("pd0")["preemptions_total"] > 0:
                break
            assert [answer.token_ids for answer in await served.answer_all(cases, max_tokens)] == expected_of(cases)
        assert served.gauges("pd0")["preemptions_total"] > 0
    if served.prefix != "whisper":  # whose rules ask for log-probabilities, for which every step waits
        assert (served.gauges("pd0")["steps_ahead_total"] > 0) == (served.prefix in AHEAD)
    await served.wait_until_nothing_is_held()


async def test_arrivals_in_the_middle_of_decoding_change_nothing(served: Served, cases: list[Case]) -> None:
    max_tokens = MAX_TOKENS[served.prefix]
    together = await served.answer_all(cases, max_tokens)
    staggered = await served.answer_all(cases, max_tokens, one_by_one=True)
    assert [answer.text for answer in staggered] == [answer.text for answer in together]
    if not served.info.is_encoder_decoder:  # a streamed transcription tells no tokens
        assert [answer.token_ids for answer in staggered] == expected_of(cases)
        assert [_end(answer) for answer in staggered] == [_end(answer) for answer in together]
        assert [one.num_prompt_tokens for one in staggered] == [one.num_prompt_tokens for one in together]
    await served.wait_until_nothing_is_held()


async def test_timestamps_of_transcripts_equal_transformers(served: Served) -> None:
    if served.prefix != "whisper":
        pytest.skip("only Whisper tells the time")
    cases = timed_speech_cases(Reference(served.info.folder), MAX_TOKENS["whisper"])
    answers = await served.answer_all(cases, MAX_TOKENS["whisper"])
    assert [answer.token_ids for answer in answers] == expected_of(cases)
    prompt = served.text.decode(cases[0].prompt, skip_special_tokens=False)
    extra = {
        "decoder_prompt": prompt,
        "max_completion_tokens": MAX_TOKENS["whisper"],
        "return_token_ids": True,
        **WITHOUT_RULES,
    }
    async with served.client() as client:
        create: Any = client.audio.transcriptions.create
        result = await create(model=served.info.name, file=cases[0].http["file"], extra_body=extra)
    assert (result.text, result.token_ids) == (answers[0].text, answers[0].token_ids)
    await served.wait_until_nothing_is_held()


def _end(answer: Answer) -> tuple[int | None, str | None]:
    return answer.num_tokens, answer.finish_reason


def _expected_end(case: Case, max_tokens: int) -> tuple[int, str]:
    """The number of tokens, the end of sequence included, and why there are no more."""
    ended = len(case.expected) < max_tokens
    return len(case.expected) + ended, "stop" if ended else "length"


def _text(llm: LLM, case: Case) -> str:
    """What a user sees of the expected tokens."""
    text = llm.text.decode(case.expected)
    return text.strip() if llm.info.is_encoder_decoder else text
