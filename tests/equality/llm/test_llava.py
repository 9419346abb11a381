"""LLaVA-1.5, Idefics3 and their relatives: `LLM` answers what transformers answers to prompts that its own processors
made, whatever the chunks, caches and arrivals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.sampling_params import SamplingParams
from engine.llm import LLM
from tests.equality.cases import MAX_TOKENS as LIMITS
from tests.equality.cases import Case, CasesOf, FolderOf
from tests.equality.runs import answer_all, at_once_or_staggered, expected_of, llm_of_blocks
from tests.tiny.llava import LLAVA_PATCH, LLAVA_SIDE

MAX_TOKENS = LIMITS["llava"]
ROW_BYTES = 64 * 4
LARGEST = {"llava": (LLAVA_SIDE // LLAVA_PATCH) ** 2, "idefics3": 10 * 4}
"""Rows of a picture's encoder output at most; an Idefics3 picture has up to nine pieces and the whole."""
OPTIONS: list[dict[str, Any]] = [{}, {"max_num_batched_tokens": 16, "block_size": 4}, {"encoder_batch_items": 1}]
Setup = tuple[Path, list[Case], int]


@pytest.fixture(scope="module", params=LARGEST)
def setup(request: pytest.FixtureRequest, folder_of: FolderOf, cases_of: CasesOf) -> Setup:
    return folder_of(request.param), cases_of(request.param), LARGEST[request.param] * ROW_BYTES


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@at_once_or_staggered(2)
def test_tokens_equal_transformers(setup: Setup, options: dict[str, Any], steps_between: int) -> None:
    folder, cases, _ = setup
    llm = LLM(folder, **options)
    assert answer_all(llm, cases, MAX_TOKENS, steps_between=steps_between) == expected_of(cases)


@pytest.mark.parametrize("name", ["llava_siglip", "llava_next", "smolvlm"])
def test_tokens_of_their_relatives_equal_transformers(name: str, folder_of: FolderOf, cases_of: CasesOf) -> None:
    cases = cases_of(name)
    assert answer_all(LLM(folder_of(name)), cases, MAX_TOKENS, steps_between=1) == expected_of(cases)


def test_tokens_equal_transformers_when_cache_and_pool_are_too_small_for_all(setup: Setup) -> None:
    folder, cases, largest_bytes = setup
    num_blocks = (_longest_prompt(folder, cases) + MAX_TOKENS) // 8 + 2
    room = {"max_num_batched_tokens": 48, "encoder_cache_bytes": 2 * largest_bytes}
    llm = llm_of_blocks(folder, num_blocks, 8, **room)
    assert answer_all(llm, cases, MAX_TOKENS, steps_between=1) == expected_of(cases)
    stats = llm.decoder.stats()
    assert stats["preemptions_total"] > 0
    assert stats["encoder_cache_bytes_peak"] <= 2 * largest_bytes


def _longest_prompt(folder: Path, cases: list[Case]) -> int:
    """In tokens, media included."""
    prompts: Any = [{"prompt_token_ids": case.prompt, "multi_modal_data": {"image": case.media}} for case in cases]
    outputs = LLM(folder).generate(prompts, SamplingParams(temperature=0.0, max_tokens=1))
    return max(output.num_prompt_tokens for output in outputs)
