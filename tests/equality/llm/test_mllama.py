"""Mllama: `LLM` answers what transformers answers, with up to four pictures of several sizes in a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.errors import TriptychError
from common.sampling_params import SamplingParams
from engine.llm import LLM
from tests.equality.cases import MAX_TOKENS as LIMITS
from tests.equality.cases import Case, CasesOf, FolderOf, ReferenceOf
from tests.equality.media import picture
from tests.equality.references import Reference
from tests.equality.runs import answer_all, expected_of
from tests.media_files import encoded
from tests.tiny.mllama import IMAGE_TOKEN

MAX_TOKENS = LIMITS["mllama"]
OPTIONS: list[dict[str, Any]] = [{}, {"max_num_batched_tokens": 16, "block_size": 4}, {"encoder_batch_items": 1}]


@pytest.fixture(scope="module")
def folder(folder_of: FolderOf) -> Path:
    return folder_of("mllama")


@pytest.fixture(scope="module")
def cases(cases_of: CasesOf, reference_of: ReferenceOf) -> list[Case]:
    """Conversations, and prompts whose pictures stand first, last, and next to each other."""
    reference = reference_of("mllama")
    return [*cases_of("mllama"), *(_case(reference, *place) for place in PLACES)]


PLACES = [
    ([IMAGE_TOKEN, 65, 66], [0]),
    ([65, 66, IMAGE_TOKEN], [3]),
    ([65, IMAGE_TOKEN, IMAGE_TOKEN, 66], [1, 5]),
    ([IMAGE_TOKEN, 65, IMAGE_TOKEN, IMAGE_TOKEN, IMAGE_TOKEN], [4, 2, 2, 1]),
]


def _case(reference: Reference, prompt: list[int], pictures: list[int]) -> Case:
    images = [picture(seed) for seed in pictures]
    return Case(prompt, reference.generate(prompt, MAX_TOKENS, images), [encoded(image) for image in images])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("steps_between", [0, 2], ids=["at once", "staggered"])
def test_tokens_equal_transformers(
    folder: Path, cases: list[Case], options: dict[str, Any], steps_between: int
) -> None:
    llm = LLM(folder, **options)
    assert answer_all(llm, cases, MAX_TOKENS, steps_between=steps_between) == expected_of(cases)


def test_tokens_equal_transformers_when_pool_and_cache_are_too_small_for_all(folder: Path, cases: list[Case]) -> None:
    block_bytes = 2 * 3 * 8 * 2 * 16 * 4  # of three layers, in fp32
    most = max(len(case.media) for case in cases)
    num_blocks = -(-most * 20 // 8) + 12
    room = {"kv_cache_bytes": num_blocks * block_bytes, "encoder_cache_bytes": most * 20 * 64 * 4}
    llm = LLM(folder, block_size=8, max_num_batched_tokens=32, **room)
    assert answer_all(llm, cases, MAX_TOKENS, steps_between=1) == expected_of(cases)
    assert llm.decoder.stats()["preemptions_total"] > 0


def test_the_pictures_of_a_request_are_projected_once_for_all_who_read_them(folder: Path, cases: list[Case]) -> None:
    llm = LLM(folder)
    repeated = [case for case in cases if case.media] * 2
    assert answer_all(llm, repeated, MAX_TOKENS, steps_between=1) == expected_of(repeated)
    assert llm.decoder.stats()["cross_table_hits_total"] > 0


@pytest.mark.parametrize("first", [0, 1])
def test_the_same_pictures_with_text_between_them_and_without_are_not_taken_for_each_other(
    folder: Path, reference_of: ReferenceOf, first: int
) -> None:
    """Their tables have the same rows in another order."""
    prompts = [[65, IMAGE_TOKEN, 66, 67, IMAGE_TOKEN, 68], [65, IMAGE_TOKEN, IMAGE_TOKEN, 66, 67, 68]]
    pair = [_case(reference_of("mllama"), prompt, [1, 5]) for prompt in prompts]
    llm = LLM(folder)
    for case in (pair[first], pair[1 - first]):
        assert answer_all(llm, [case], MAX_TOKENS) == expected_of([case])


def test_pictures_that_never_fit_together_are_refused_with_the_numbers(folder: Path, cases: list[Case]) -> None:
    most = max(cases, key=lambda case: len(set(case.media)))
    room, needed = (20 * 64 * 4 * count for count in (len(set(most.media)) - 1, len(set(most.media))))
    llm = LLM(folder, encoder_cache_bytes=room)
    with pytest.raises(
        TriptychError, match=f"need {needed} bytes of encoder cache at once, the whole budget is {room}"
    ):
        answer_all(llm, [most], MAX_TOKENS)
    assert llm.decoder.is_empty()


@pytest.mark.parametrize(
    ("ids", "count", "told"), [([IMAGE_TOKEN, 65, 66], 1, [None, 65, 66]), ([65, IMAGE_TOKEN, 66], 0, [None, None, 66])]
)
def test_prompt_logprobs_leave_out_pictures_which_have_no_logit(
    folder: Path, ids: list[int], count: int, told: list[int | None]
) -> None:
    prompt: Any = {"prompt_token_ids": ids, "multi_modal_data": {"image": encoded(picture(1))}}
    [output] = LLM(folder).generate(prompt, SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=count))
    assert [None if one is None else one.token_id for one in output.prompt_logprobs] == told
