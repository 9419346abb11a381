"""Qwen2.5-VL, random and bundled: `LLM` answers what transformers answers, whatever the chunks, caches and arrivals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.llm import LLM
from tests.equality.cases import MAX_TOKENS as LIMITS
from tests.equality.cases import Case, CasesOf, FolderOf
from tests.equality.runs import answer_all, at_once_or_staggered, expected_of, llm_of_blocks

MAX_TOKENS = LIMITS["qwen2_5_vl"]
CACHE_OF_TWO = 2 * 49 * 64 * 4
"""Bytes of two of the tiny model's largest pictures (49 tokens of 64 floats)."""
OPTIONS: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 16},
    {"max_num_batched_tokens": 64, "block_size": 4},
    {"encoder_cache_bytes": CACHE_OF_TWO},
    {"encoder_cache_bytes": CACHE_OF_TWO, "max_num_batched_tokens": 16, "max_num_seqs": 3},
    {"encoder_batch_items": 1},
]


@pytest.fixture(scope="module")
def tiny(folder_of: FolderOf, cases_of: CasesOf) -> tuple[Path, list[Case]]:
    return folder_of("qwen2_5_vl"), cases_of("qwen2_5_vl")


@pytest.fixture(scope="module")
def signs(folder_of: FolderOf, cases_of: CasesOf) -> tuple[Path, list[Case]]:
    return folder_of("signpost"), cases_of("signpost")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@at_once_or_staggered(2)
def test_tokens_equal_transformers(tiny: tuple[Path, list[Case]], options: dict[str, Any], steps_between: int) -> None:
    folder, cases = tiny
    llm = LLM(folder, **options)
    assert answer_all(llm, cases, MAX_TOKENS, steps_between=steps_between) == expected_of(cases)
    stats = llm.decoder.stats()
    assert stats["encoder_cache_bytes_peak"] <= stats["encoder_cache_bytes_capacity"]


@pytest.mark.parametrize("steps_between", [0, 1], ids=["at once", "staggered"])
@pytest.mark.parametrize("cache_bytes", [CACHE_OF_TWO // 2, 64 * 2**20], ids=["cache of one", "roomy cache"])
def test_tokens_equal_transformers_when_the_pool_is_too_small_for_all(
    tiny: tuple[Path, list[Case]], cache_bytes: int, steps_between: int
) -> None:
    folder, cases = tiny
    num_blocks = (3 * 49 + 90 + MAX_TOKENS) // 8 + 1
    llm = llm_of_blocks(folder, num_blocks, 8, max_num_batched_tokens=48, encoder_cache_bytes=cache_bytes)
    assert answer_all(llm, cases, MAX_TOKENS, steps_between=steps_between) == expected_of(cases)
    stats = llm.decoder.stats()
    assert stats["preemptions_total"] > 0
    assert stats["encoder_cache_bytes_peak"] <= cache_bytes


@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.slow), {"max_num_batched_tokens": 16, "block_size": 4}], ids=str
)
def test_the_bundled_model_answers_as_under_transformers(
    signs: tuple[Path, list[Case]], options: dict[str, Any]
) -> None:
    folder, cases = signs
    assert answer_all(LLM(folder, **options), cases, MAX_TOKENS, steps_between=1) == expected_of(cases)


def test_equal_pictures_are_encoded_once(tiny: tuple[Path, list[Case]]) -> None:
    folder, cases = tiny
    llm = LLM(folder)
    assert answer_all(llm, [cases[1]] * 5, MAX_TOKENS) == [cases[1].expected] * 5
    assert llm.decoder.stats()["inputs_stored_total"] == len(cases[1].media)
