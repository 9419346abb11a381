"""Videos in clusters: transformers' answers, whichever encoder has which piece."""

from __future__ import annotations

from typing import Any

import pytest

from tests.equality.cases import FolderOf, ReferenceOf
from tests.equality.frame_videos import frame_cases
from tests.equality.runs import expected_of
from tests.equality.served import serve
from tests.equality.videos import video_cases

pytestmark = pytest.mark.cluster
MAX_TOKENS = 16


@pytest.mark.parametrize(
    ("name", "topology"),
    [
        ("qwen2_vl", "1e1p1d"),
        ("qwen2_5_vl", "2e1pd"),
        ("qwen2_5_vl", "1e1p1d"),
        ("qwen3_vl", "1e1p1d"),
        ("smolvlm", "1epd"),
        ("smolvlm", "2e1pd"),
        ("smolvlm", "1e1p1d"),
    ],
)
async def test_answers_equal_transformers(
    name: str, topology: str, folder_of: FolderOf, reference_of: ReferenceOf, broker_url: str
) -> None:
    cases = (frame_cases if name == "smolvlm" else video_cases)(reference_of(name), MAX_TOKENS)
    limits = {"max_num_batched_tokens": 32, "block_size": 8, "max_num_seqs": 12}
    cluster = f"videos-{name}-{topology}"
    with serve(folder_of(name), broker_url, cluster, topology=topology, **limits) as served:
        for one_by_one in (False, True):
            answers = await served.answer_all(cases, MAX_TOKENS, one_by_one=one_by_one)
            assert [answer.token_ids for answer in answers] == expected_of(cases)
        await served.wait_until_nothing_is_held()


async def test_the_prompt_of_a_video_is_told(folder_of: FolderOf, reference_of: ReferenceOf, broker_url: str) -> None:
    [first, *_] = frame_cases(reference_of("smolvlm"), 4)
    with serve(folder_of("smolvlm"), broker_url, "videos-told", topology="1epd") as served:
        async with served.client() as client:
            extra = {"return_prompts": True}
            options: Any = {"messages": first.http["messages"], "max_tokens": 4, "extra_body": extra}
            completion: Any = await client.chat.completions.create(model=served.info.name, **options)
    assert "the following series of six frames from a 0:00:05 [H:MM:SS] video" in completion.choices[0].prompt
    assert completion.usage.prompt_tokens > 6 * len("\nFrame from 00:00:")
