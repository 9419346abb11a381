"""The engine on a GPU in half precision: no further from float32 than a CPU in the same dtype, and the same answers.

A CPU computes the same model with PyTorch alone, so it is the measure of what rounding does to a model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from common.sampling_params import SamplingParams
from engine.llm import LLM
from tests.equality.cases import MAX_TOKENS, Case, CasesOf, FolderOf
from tests.equality.conftest import MAKERS
from tests.equality.runs import answer_all, expected_of
from tests.gpu import fast_path
from tests.gpu.conftest import OWN_MAKERS
from tests.gpu.device import DEVICE, needs_gpu

pytestmark = needs_gpu
DTYPES = ("bfloat16", "float16")
FAMILIES = ("llama", "qwen2", "qwen2_5_vl", "mllama", "bart", "whisper", "t5")
"""The last one's self-attention has a bias by position: FlashInfer has none, and PyTorch computes it."""
ALL = tuple(OWN_MAKERS | MAKERS)
PRECISE = [*((family, "bfloat16") for family in ALL), *((family, "float16") for family in FAMILIES)]
MEAN_FACTOR, MAX_FACTOR = 1.5, 3.0
MARGIN_FACTOR = 4.0
"""Two ways to round may choose different tokens where neither is likelier by more than so many errors of rounding."""


@pytest.mark.parametrize(("family", "dtype"), PRECISE)
def test_log_probabilities_stray_no_further_than_a_cpus(
    family: str, dtype: str, folder_of: FolderOf, cases_of: CasesOf
) -> None:
    folder, cases = folder_of(family), comparable(cases_of(family))
    exact = logprobs(LLM(folder, device="cpu", dtype="float32"), cases)
    rounding = np.abs(logprobs(LLM(folder, device="cpu", dtype=dtype), cases) - exact)
    llm = LLM(folder, device=DEVICE, dtype=dtype, memory_fraction=0.2, **fast_path.flashinfer_for(dtype))
    fast_path.check_encoder(llm)
    ours = np.abs(logprobs(llm, cases) - exact)
    assert ours.mean() > 0, "as from a copy"
    check_strayed(ours, rounding)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_fast_path_answers_as_the_plain_one(family: str, folder_of: FolderOf, cases_of: CasesOf) -> None:
    """Batches of exactly the sizes that are recorded. Tokens are those of the overlapped loop; log-probabilities are
    asked for apart, for the host then looks at every step."""
    folder = folder_of(family)
    batches = [fast_path.batch_of(comparable(cases_of(family)), size) for size in fast_path.BATCHES]
    with fast_path.plain_llm(folder, "bfloat16") as plain:
        expected = [fast_path.answer(plain, batch, logprobs=0) for batch in batches]
        stats = plain.decoder.stats()
        assert stats["steps_replayed_total"] == stats["steps_ahead_total"] == 0
    with fast_path.fast_llm(folder, "bfloat16") as fast:
        ahead = [fast_path.answer(fast, batch) for batch in batches]
        told = [fast_path.answer(fast, batch, logprobs=0) for batch in batches]
        stats = fast.decoder.stats()
        assert min(stats["steps_replayed_total"], stats["steps_ahead_total"]) >= 8 * len(batches)
    assert [one.most_common for one in (*expected, *ahead, *told)] == 3 * [*fast_path.BATCHES]
    exact = fast_path.opinions(LLM(folder, device="cpu", dtype="float32"), batches, expected, told)
    half = fast_path.opinions(LLM(folder, device="cpu", dtype="bfloat16"), batches, expected, told)
    rounding = fast_path.errors([half_of[0].logprobs for half_of in half], exact, 0)
    for which, answers in enumerate((expected, told)):
        error = fast_path.errors([one.logprobs for one in answers], exact, which)
        assert error.mean() > 0, "as from a copy"
        check_strayed(error, rounding)
    for got in (ahead, told):
        for mine, theirs, known in zip(got, expected, exact, strict=True):
            for prompt, position in fast_path.differences(mine.tokens, theirs.tokens):
                assert known[0].margins[prompt, position] <= MARGIN_FACTOR * rounding.max()


@pytest.mark.parametrize("family", FAMILIES)
def test_no_step_waits_for_the_device(family: str, folder_of: FolderOf, cases_of: CasesOf) -> None:
    """Prefills and decodes, recorded or not. The first time, kernels and workspaces are made."""
    batch = fast_path.batch_of(comparable(cases_of(family)), 4)
    for eager in (False, True):
        with fast_path.fast_llm(folder_of(family), "bfloat16", enforce_eager=eager, prefix_caching=False) as llm:
            for options in ({}, {"temperature": 1.0, "seed": 3, "top_p": 0.9}):
                fast_path.answer(llm, batch, **options)
                with fast_path.without_waiting(llm):
                    assert fast_path.answer(llm, batch, **options).tokens
            assert (llm.decoder.stats()["steps_replayed_total"] == 0) == eager


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bundled_model_answers_as_in_float32(dtype: str, cases_of: CasesOf) -> None:
    cases = cases_of("signpost")
    llm = LLM("signpost", device=DEVICE, dtype=dtype, memory_fraction=0.2, **fast_path.flashinfer_for(dtype))
    fast_path.check_encoder(llm)
    assert answer_all(llm, cases, MAX_TOKENS["signpost"]) == expected_of(cases)
    assert answer_all(llm, cases, MAX_TOKENS["signpost"], steps_between=2) == expected_of(cases)


def check_strayed(strayed: npt.NDArray[np.float64], rounding: npt.NDArray[np.float64]) -> None:
    """Log-probabilities stray from float32 no further than in half precision by PyTorch alone."""
    assert strayed.mean() <= MEAN_FACTOR * rounding.mean(), f"PyTorch strays by {rounding.mean()} on average"
    assert strayed.max() <= MAX_FACTOR * rounding.max(), f"PyTorch strays by {rounding.max()} at most"


def comparable(cases: Sequence[Case]) -> list[Case]:
    """Those whose prompts are known: where the language is left to be detected, a part is generated."""
    return [case for case in cases if not case.rules.get("prefix_allowed")]


def logprobs(llm: LLM, cases: Sequence[Case]) -> npt.NDArray[np.float64]:
    """Of the tokens that float32 answers with, one after the other over all cases, as parts of the prompts."""
    each = [
        SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, adapter=case.rules.get("adapter", ""))
        for case in cases
    ]
    outputs = llm.generate([fast_path.prompt_of(llm, case, case.expected) for case in cases], each)
    told = [
        entry.logprob
        for case, output in zip(cases, outputs, strict=True)
        for entry in output.prompt_logprobs[len(output.prompt_logprobs) - len(case.expected) :]
        if entry is not None
    ]
    assert len(told) == sum(len(case.expected) for case in cases) > 0
    return np.array(told)
