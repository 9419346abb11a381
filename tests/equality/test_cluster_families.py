"""transformers == a cluster of processes for the families beyond those of test_cluster.py: one short-lived one each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.equality.cases import MAX_TOKENS, Case
from tests.equality.runs import expected_of
from tests.equality.served import serve

pytestmark = pytest.mark.cluster
FAMILIES = ("qwen2_vl", "qwen3_vl", "qwen2_audio")
NUM_CASES = 4


@pytest.mark.parametrize("family", FAMILIES)
async def test_answers_equal_transformers(
    family: str, folder_of: Callable[[str], Path], cases_of: Callable[[str], list[Case]], broker_url: str
) -> None:
    cases, max_tokens = cases_of(family)[:NUM_CASES], MAX_TOKENS[family]
    with serve(folder_of(family), broker_url, family, max_num_batched_tokens=32, block_size=8) as served:
        together = await served.answer_all(cases, max_tokens)
        assert [answer.token_ids for answer in together] == expected_of(cases)
        assert [answer.text for answer in together] == [served.text.decode(case.expected) for case in cases]
        staggered = await served.answer_all(cases, max_tokens, one_by_one=True)
        assert [answer.token_ids for answer in staggered] == expected_of(cases)
        await served.wait_until_nothing_is_held()
