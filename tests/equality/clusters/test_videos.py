"""Videos in clusters: transformers' answers, whichever encoder has which piece."""

from __future__ import annotations

import pytest

from tests.equality.cases import FolderOf, ReferenceOf
from tests.equality.runs import expected_of
from tests.equality.served import serve
from tests.equality.videos import video_cases

pytestmark = pytest.mark.cluster
MAX_TOKENS = 16


@pytest.mark.parametrize(
    ("name", "topology"),
    [("qwen2_vl", "1e1p1d"), ("qwen2_5_vl", "2e1pd"), ("qwen2_5_vl", "1e1p1d"), ("qwen3_vl", "1e1p1d")],
)
async def test_answers_equal_transformers(
    name: str, topology: str, folder_of: FolderOf, reference_of: ReferenceOf, broker_url: str
) -> None:
    cases = video_cases(reference_of(name), MAX_TOKENS)
    limits = {"max_num_batched_tokens": 32, "block_size": 8, "max_num_seqs": 12}
    cluster = f"videos-{name}-{topology}"
    with serve(folder_of(name), broker_url, cluster, topology=topology, **limits) as served:
        for one_by_one in (False, True):
            answers = await served.answer_all(cases, MAX_TOKENS, one_by_one=one_by_one)
            assert [answer.token_ids for answer in answers] == expected_of(cases)
        await served.wait_until_nothing_is_held()
