"""Text models: `LLM` generates what transformers' greedy `generate` generates, however it is batched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.sampling_params import SamplingParams
from engine.llm import LLM
from tests.equality.cases import MAX_TOKENS as LIMITS
from tests.equality.cases import Case, CasesOf, FolderOf
from tests.equality.runs import answer_all, at_once_or_staggered, expected_of, llm_of_blocks

MAX_TOKENS = LIMITS["llama"]
OPTIONS: list[Any] = [
    {},
    pytest.param({"max_num_batched_tokens": 16}, marks=pytest.mark.slow),
    {"max_num_batched_tokens": 64, "block_size": 1},
    pytest.param({"max_num_batched_tokens": 1024, "block_size": 64}, marks=pytest.mark.slow),
    {"max_num_seqs": 3, "block_size": 5},
]
Setup = tuple[Path, list[Case]]


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3", "mistral", "gemma3_text"])
def text_cases(request: pytest.FixtureRequest, folder_of: FolderOf, cases_of: CasesOf) -> Setup:
    return folder_of(request.param), cases_of(request.param)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@at_once_or_staggered(3)
def test_tokens_equal_transformers(text_cases: Setup, options: dict[str, Any], steps_between: int) -> None:
    folder, cases = text_cases
    llm = LLM(folder, **options)
    assert answer_all(llm, cases, MAX_TOKENS, steps_between=steps_between) == expected_of(cases)


@pytest.mark.parametrize("block_size", [4, pytest.param(16, marks=pytest.mark.slow)])
def test_tokens_equal_transformers_when_the_pool_is_too_small_for_all(text_cases: Setup, block_size: int) -> None:
    folder, cases = text_cases
    longest = max(len(case.prompt) for case in cases) + MAX_TOKENS
    num_blocks = -(-longest // block_size) + 2
    llm = llm_of_blocks(folder, num_blocks, block_size, max_num_batched_tokens=32)
    assert answer_all(llm, cases, MAX_TOKENS, steps_between=1) == expected_of(cases)
    assert llm.decoder.stats()["preemptions_total"] > 0


def test_an_abort_in_the_middle_changes_nobody_else(text_cases: Setup) -> None:
    folder, cases = text_cases
    llm = LLM(folder, max_num_batched_tokens=32)
    doomed = [
        llm.add({"prompt_token_ids": case.prompt}, SamplingParams(temperature=0, max_tokens=40)) for case in cases[:4]
    ]
    for _ in range(6):
        llm.step()
    for request_id in doomed[::2]:
        llm.abort(request_id)
    kept = [
        llm.add({"prompt_token_ids": case.prompt}, SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
        for case in cases
    ]
    for request_id in doomed[1::2]:
        llm.abort(request_id)
    answers: dict[str, list[int]] = {}
    while len(answers) < len(kept):
        answers |= {output.request_id: output.outputs[0].token_ids for output in llm.step()}
    ends = llm.info.eos_token_ids
    got = [[token for token in answers[request_id] if token not in ends] for request_id in kept]
    assert got == expected_of(cases)
    assert llm.decoder.is_empty()
    llm.decoder.check_integrity()


def test_finish_reasons_tell_the_end_of_the_text_from_the_limit(text_cases: Setup) -> None:
    folder, cases = text_cases
    llm = LLM(folder)
    outputs = llm.generate(
        [{"prompt_token_ids": case.prompt} for case in cases], SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    )
    for case, output in zip(cases, outputs, strict=True):
        [completion] = output.outputs
        ended = len(case.expected) < MAX_TOKENS
        assert completion.finish_reason == ("stop" if ended else "length")
        assert output.num_prompt_tokens == len(case.prompt)
        assert completion.text == llm.text.decode(case.expected)
