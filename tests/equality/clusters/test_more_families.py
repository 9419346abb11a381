"""transformers == `LLM` == a cluster with prefill apart from decode, for every family but Whisper, which
test_topologies.py spreads: few requests each, one cluster at a time."""

from __future__ import annotations

from typing import Any

import pytest

from common.families import FAMILIES
from common.model_info import load_model_info
from common.sampling_params import SamplingParams
from engine.llm import LLM
from tests.equality.cases import MAX_TOKENS, Case, CasesOf, FolderOf
from tests.equality.runs import expected_of, prompt_of
from tests.equality.served import Served, serve

pytestmark = pytest.mark.cluster
TEXT = ("llama", "qwen2", "qwen3", "mistral", "gemma3_text")
QWENS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen2_audio", "qwen3_asr")
PICTURES = ("gemma3", "llava", "llava_siglip", "llava_next", "idefics3", "smolvlm", "mllama")
WITH_ENCODER = (*PICTURES, *QWENS, "florence2", "bart", "mbart", "t5", "flan_t5")
NUM_CASES = 4
SEARCHES: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"temperature": 1.0, "seed": 5}, {"temperature": 1.0, "seed": 5}),
    ({"extra_body": {"use_beam_search": True}}, {"temperature": 0.0, "beam_width": 2}),
)
"""Two sampled sequences, and two beams: as a client asks for them, and as `LLM` is asked."""


def test_no_family_is_forgotten(folder_of: FolderOf) -> None:
    tested = {load_model_info(str(folder_of(name))).family.name for name in (*TEXT, *WITH_ENCODER, "whisper")}
    assert tested == {family.name for family in FAMILIES}


@pytest.mark.parametrize("name", [*TEXT, *WITH_ENCODER])
async def test_answers_equal_transformers(name: str, folder_of: FolderOf, cases_of: CasesOf, broker_url: str) -> None:
    """At once and one by one, each kind of request among them: with no, one, two and three inputs."""
    cases, max_tokens = cases_of(name)[:NUM_CASES], MAX_TOKENS[name]
    apart = {"topology": "1p1d" if name in TEXT else "1e1p1d"}
    limits = {"max_num_batched_tokens": 32, "block_size": 8, "max_num_seqs": 12}
    with serve(folder_of(name), broker_url, name, **limits, **apart) as served:  # type: ignore[arg-type]
        for one_by_one in (False, True):
            answers = await served.answer_all(cases, max_tokens, one_by_one=one_by_one)
            assert [answer.token_ids for answer in answers] == expected_of(cases)
            assert [answer.text for answer in answers] == [served.text.decode(case.expected) for case in cases]
        assert served.total("decode", "prefill_handoffs_total") >= 2 * sum(len(case.prompt) > 1 for case in cases)
        apart_before = served.total("decode", "prefill_handoffs_total")
        await _compare_two_sequences(served, cases[-1])
        assert served.total("decode", "prefill_handoffs_total") - apart_before == len(SEARCHES)
        assert served.total("decode", "recomputed_tokens_total") == 0
        assert served.total("decode", "inputs_stored_total") == 0, "media go to the prefill worker alone"
        await served.wait_until_nothing_is_held()


async def _compare_two_sequences(served: Served, case: Case) -> None:
    llm = LLM(served.info.folder)
    for asked, params in SEARCHES:
        choices = await served.choices(case, n=2, max_tokens=12, **asked)
        sampling = SamplingParams(**params, n=2, max_tokens=12, ignore_eos=True)
        (expected,) = llm.generate(prompt_of(served.info, case), sampling)
        assert [choice.token_ids for choice in choices] == [one.token_ids for one in expected.outputs]
        assert len({tuple(choice.token_ids) for choice in choices}) == 2
