"""Qwen models that see or hear: `LLM` answers what transformers answers, however requests are batched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.errors import TriptychError
from common.sampling_params import SamplingParams
from engine.llm import LLM
from tests.equality.cases import MAX_TOKENS, Case, CasesOf, FolderOf
from tests.equality.runs import answer_all, at_once_or_staggered, expected_of, llm_of_blocks, strip

OPTIONS: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 16, "block_size": 4, "encoder_batch_items": 1},
    {"max_num_batched_tokens": 64, "max_num_seqs": 3, "encoder_cache_bytes": 2 * 125 * 64 * 4 * 3},
]
Setup = tuple[Path, list[Case], int]


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen3_vl", "qwen2_audio", "qwen3_asr"])
def setup(request: pytest.FixtureRequest, folder_of: FolderOf, cases_of: CasesOf) -> Setup:
    return folder_of(request.param), cases_of(request.param), MAX_TOKENS[request.param]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@at_once_or_staggered(2)
def test_tokens_equal_transformers(setup: Setup, options: dict[str, Any], steps_between: int) -> None:
    folder, cases, max_tokens = setup
    llm = LLM(folder, **options)
    assert answer_all(llm, cases, max_tokens, steps_between=steps_between) == expected_of(cases)


def test_tokens_equal_transformers_when_the_pool_is_too_small_for_all(setup: Setup) -> None:
    folder, cases, max_tokens = setup
    num_blocks = (3 * 100 + 120 + max_tokens) // 8 + 1
    llm = llm_of_blocks(folder, num_blocks, 8, max_num_batched_tokens=48)
    assert answer_all(llm, cases, max_tokens, steps_between=1) == expected_of(cases)
    assert llm.decoder.stats()["preemptions_total"] > 0


def test_tokens_equal_transformers_when_prompts_are_found_in_the_prefix_cache(setup: Setup) -> None:
    folder, cases, max_tokens = setup
    llm = LLM(folder, block_size=4)
    assert answer_all(llm, cases, max_tokens) == expected_of(cases)
    computed = llm.decoder.stats()["prompt_tokens_total"]
    again = answer_all(llm, cases, max_tokens, steps_between=1)
    assert again == expected_of(cases)
    assert llm.decoder.stats()["prefix_hit_tokens_total"] > computed / 2


def test_answers_depend_on_what_is_seen_or_heard(setup: Setup) -> None:
    """Otherwise equality would prove nothing."""
    folder, cases, max_tokens = setup
    one = [case for case in cases if len(case.media) == 1]
    swapped = Case(one[0].prompt, [], one[1].media)
    assert one[0].media != one[1].media
    assert answer_all(LLM(folder), [swapped], max_tokens) != [one[0].expected]


def test_a_conversation_gives_the_same_answer(setup: Setup) -> None:
    folder, cases, max_tokens = setup
    llm, conversations = LLM(folder), []
    for case in cases:
        media = iter(case.media)
        [message] = case.http["messages"]
        content = [part if part["type"] == "text" else _media_part(llm, next(media)) for part in message["content"]]
        conversations.append([{"role": "user", "content": content}])
    outputs = llm.chat(conversations, SamplingParams(temperature=0.0, max_tokens=max_tokens))
    assert [strip(llm.info, output.outputs[0].token_ids) for output in outputs] == expected_of(cases)


def test_media_of_another_kind_are_refused(setup: Setup) -> None:
    llm = LLM(setup[0])
    other = "image" if llm.info.media_kind == "audio" else "audio"
    with pytest.raises(TriptychError, match=f"takes no {other}"):
        llm.chat([{"role": "user", "content": [{"type": other, other: b""}]}])


def _media_part(llm: LLM, media: bytes) -> dict[str, Any]:
    kind = str(llm.info.media_kind)
    return {"type": kind, kind: media}
