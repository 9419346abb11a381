"""Gemma 3: `LLM` answers what transformers answers, though the tokens of an image see each other in both directions."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import TriptychError
from common.sampling_params import SamplingParams
from engine.llm import LLM
from tests.equality.cases import MAX_TOKENS as LIMITS
from tests.equality.cases import CasesOf, FolderOf
from tests.equality.media import picture
from tests.equality.runs import answer_all, expected_of, llm_of_blocks
from tests.media_files import encoded
from tests.tiny.gemma3 import NUM_IMAGE_TOKENS

MAX_TOKENS = LIMITS["gemma3"]
LEAST: dict[str, Any] = {"max_num_batched_tokens": NUM_IMAGE_TOKENS + 4, "max_num_seqs": 4, "block_size": 4}


@pytest.mark.parametrize("options", [{}, LEAST, {**LEAST, "itl_objective_ms": 1.0}], ids=["plain", "least", "paced"])
@pytest.mark.parametrize("steps_between", [0, 2], ids=["at once", "staggered"])
def test_tokens_equal_transformers(
    folder_of: FolderOf, cases_of: CasesOf, options: dict[str, Any], steps_between: int
) -> None:
    cases = cases_of("gemma3")
    llm = LLM(folder_of("gemma3"), **options)
    assert answer_all(llm, cases, MAX_TOKENS, steps_between=steps_between) == expected_of(cases)
    assert answer_all(llm, cases, MAX_TOKENS, steps_between=1) == expected_of(cases), "with prefixes in the cache"


def test_tokens_equal_transformers_when_the_pool_is_too_small_for_all(folder_of: FolderOf, cases_of: CasesOf) -> None:
    cases = cases_of("gemma3")
    llm = llm_of_blocks(folder_of("gemma3"), 40, 4, max_num_batched_tokens=40, max_num_seqs=8)
    assert answer_all(llm, cases, MAX_TOKENS, steps_between=1) == expected_of(cases)
    assert llm.decoder.stats()["preemptions_total"] > 0


def test_several_sequences_after_an_image_begin_with_the_same_prompt(folder_of: FolderOf) -> None:
    llm = LLM(folder_of("gemma3"), block_size=64)  # the image stands in the block that each computes for itself
    prompt: Any = {"prompt": "<start_of_image>?", "multi_modal_data": {"image": [encoded(picture(1))]}}
    alone, *_ = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    several, *_ = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, n=3))
    assert [one.token_ids for one in several.outputs] == [alone.outputs[0].token_ids] * 3


def test_a_step_too_small_for_an_image_is_refused(folder_of: FolderOf) -> None:
    with pytest.raises(TriptychError, match="give at least 24"):
        LLM(folder_of("gemma3"), max_num_batched_tokens=16, max_num_seqs=8)
