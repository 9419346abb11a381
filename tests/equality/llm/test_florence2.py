"""Florence-2: `LLM` answers tasks about pictures as transformers does, whose own processor made the prompts."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import TriptychError
from common.sampling_params import SamplingParams
from engine.core.encoder_engine import encoder_computations
from engine.llm import LLM
from tests.equality.cases import MAX_TOKENS as LIMITS
from tests.equality.cases import TASK_TEXTS, CasesOf, FolderOf
from tests.equality.media import picture
from tests.equality.runs import answer_all, at_once_or_staggered, expected_of, llm_of_blocks, strip
from tests.media_files import encoded

MAX_TOKENS = LIMITS["florence2"]
OPTIONS: list[dict[str, Any]] = [{}, {"max_num_batched_tokens": 7, "block_size": 3}, {"encoder_batch_items": 1}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@at_once_or_staggered(3)
def test_tokens_equal_transformers(
    options: dict[str, Any], steps_between: int, folder_of: FolderOf, cases_of: CasesOf
) -> None:
    cases = cases_of("florence2")
    llm = LLM(folder_of("florence2"), **options)
    assert answer_all(llm, cases, MAX_TOKENS, steps_between=steps_between) == expected_of(cases)


def test_the_cases_are_worth_comparing(cases_of: CasesOf) -> None:
    cases = cases_of("florence2")
    assert len({tuple(case.expected) for case in cases}) == len(cases)
    assert sum(len(set(case.expected)) for case in cases) > 6 * len(cases)


def test_tokens_equal_transformers_when_the_pool_is_too_small_for_all(folder_of: FolderOf, cases_of: CasesOf) -> None:
    cases = cases_of("florence2")
    longest = max(len(case.prompt) for case in cases) + MAX_TOKENS
    encoder = max(len(case.encoder_prompt or []) + 4 for case in cases)
    num_blocks = -(-longest // 4) + -(-encoder // 4) + 2
    llm = llm_of_blocks(folder_of("florence2"), num_blocks, 4, max_num_batched_tokens=32)
    assert answer_all(llm, cases, MAX_TOKENS, steps_between=1) == expected_of(cases)
    assert llm.decoder.stats()["preemptions_total"] > 0


def test_a_text_a_chat_and_token_ids_ask_the_same(folder_of: FolderOf, cases_of: CasesOf) -> None:
    llm, params = LLM(folder_of("florence2")), SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    for number in (1, 2):
        case, image, text = cases_of("florence2")[number], picture(number), TASK_TEXTS[number]
        media = {"multi_modal_data": {"image": image}}
        prompts: list[Any] = [
            {"prompt": text, **media},
            {"prompt": f"<image>{text}", **media},
            {"prompt_token_ids": case.encoder_prompt, **media},
        ]
        chat = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}]
        for output in [*llm.generate(prompts, params), *llm.chat(chat, params)]:
            assert output.encoder_prompt_token_ids == case.encoder_prompt
            assert strip(llm.info, output.outputs[0].token_ids) == case.expected


def test_an_image_is_encoded_once_for_each_text(folder_of: FolderOf) -> None:
    llm, before = LLM(folder_of("florence2")), encoder_computations.value
    prompts: list[Any] = [
        {"prompt": text, "multi_modal_data": {"image": encoded(picture(0))}} for text in ("<OD>", "<OCR>", "<OD>")
    ]
    first, other, again = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8))
    assert first.outputs == again.outputs != other.outputs
    assert encoder_computations.value == before + 2


def test_locations_are_in_the_text_for_those_who_want_special_tokens(folder_of: FolderOf, cases_of: CasesOf) -> None:
    llm = LLM(folder_of("florence2"))
    told = [llm.text.decode(case.expected, skip_special_tokens=False) for case in cases_of("florence2")]
    assert any("<loc_" in text for text in told)


@pytest.mark.parametrize(
    ("prompt", "images", "message"),
    [
        ("<OD> a cat", 1, "the task <OD> takes no other text, not '<OD> a cat'"),
        ("<OD>", 0, "takes a text with one image, .*, not 0"),
        ("<OD>", 2, "takes a text with one image, .*, not 2"),
        ([0, 5, 2], 1, "takes a text with one image, and its placeholder in token ids"),
        ("x" * 150, 1, "takes at most 128"),
        ("x" * 122, 1, "has 129 tokens, the encoder of .* takes at most 128"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_refused_and_leaves_nothing(
    folder_of: FolderOf, prompt: Any, images: int, message: str
) -> None:
    llm, kind = LLM(folder_of("florence2")), "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    given: Any = {kind: prompt, "multi_modal_data": {"image": [picture(0)] * images}}
    with pytest.raises(TriptychError, match=message):
        llm.generate([given], SamplingParams(temperature=0, max_tokens=2))
    assert llm.decoder.is_empty()
    llm.decoder.check_integrity()


def test_sound_is_refused_by_name(folder_of: FolderOf) -> None:
    llm = LLM(folder_of("florence2"))
    with pytest.raises(TriptychError, match="takes text and image, no audio"):
        llm.generate([{"prompt": "<OD>", "multi_modal_data": {"audio": b"x"}}])
