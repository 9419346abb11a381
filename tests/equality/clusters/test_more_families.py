"""transformers == `LLM` == a cluster of processes for the families beyond test_families.py: few requests each, one
cluster at a time."""

from __future__ import annotations

import pytest

from tests.equality.cases import MAX_TOKENS, CasesOf, FolderOf
from tests.equality.runs import expected_of
from tests.equality.served import serve

pytestmark = pytest.mark.cluster
FAMILIES = ("qwen3", "mistral", "llava", "idefics3", "mllama", "qwen2_vl", "qwen3_vl", "qwen2_audio")
NUM_CASES = 4


@pytest.mark.parametrize("name", FAMILIES)
async def test_answers_equal_transformers(name: str, folder_of: FolderOf, cases_of: CasesOf, broker_url: str) -> None:
    """At once and one by one, each kind of request among them: with no, one, two and three inputs."""
    cases, max_tokens = cases_of(name)[:NUM_CASES], MAX_TOKENS[name]
    with serve(folder_of(name), broker_url, name, max_num_batched_tokens=32, block_size=8) as served:
        for one_by_one in (False, True):
            answers = await served.answer_all(cases, max_tokens, one_by_one=one_by_one)
            assert [answer.token_ids for answer in answers] == expected_of(cases)
            assert [answer.text for answer in answers] == [served.text.decode(case.expected) for case in cases]
        await served.wait_until_nothing_is_held()
