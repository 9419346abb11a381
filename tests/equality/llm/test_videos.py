"""Videos: `LLM` answers what transformers answers, in pieces or whole, however requests are batched."""

from __future__ import annotations

from typing import Any

import pytest

from common.sampling_params import SamplingParams
from engine.llm import LLM
from tests.equality.cases import Case, FolderOf, ReferenceOf
from tests.equality.runs import strip
from tests.equality.videos import FAMILIES, video_cases

MAX_TOKENS = 16
OPTIONS: list[dict[str, Any]] = [{}, {"max_num_batched_tokens": 16, "block_size": 4, "encoder_batch_items": 1}]
Setup = tuple[LLM, list[Case]]


@pytest.fixture(scope="module", params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def cases(name: str, reference_of: ReferenceOf) -> list[Case]:
    return video_cases(reference_of(name), MAX_TOKENS)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_tokens_equal_transformers(name: str, cases: list[Case], folder_of: FolderOf, options: dict[str, Any]) -> None:
    llm = LLM(folder_of(name), **options)
    prompts = [{"prompt_token_ids": case.prompt, "multi_modal_data": _media(llm, case)} for case in cases]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS))  # type: ignore[arg-type]
    answers = [strip(llm.info, output.outputs[0].token_ids) for output in outputs]
    assert answers == [case.expected for case in cases]
    llm.decoder.check_integrity()


def _media(llm: LLM, case: Case) -> dict[str, list[bytes]]:
    kinds = [llm.info.placeholders[token] for token in case.prompt if token in llm.info.placeholders]
    return {kind: [media for own, media in zip(kinds, case.media, strict=True) if own == kind] for kind in set(kinds)}
