"""The engine on a GPU in half precision: no further from float32 than a CPU in the same dtype, and the same answers.

A CPU computes the same model with PyTorch alone, so it is the measure of what rounding does to a model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from common.sampling_params import SamplingParams
from engine.llm import LLM
from tests.equality.cases import MAX_TOKENS, Case, make_cases
from tests.equality.references import Reference
from tests.equality.runs import answer_all, expected_of
from tests.gpu.device import DEVICE, needs_gpu

pytestmark = needs_gpu
DTYPES = ("bfloat16", "float16")
FAMILIES = ("llama", "qwen2", "qwen2_5_vl", "bart", "mllama")
"""The last one has heads of another size, and goes to PyTorch."""
REAL = sorted(Path(os.environ.get("TRIPTYCH_GPU_MODELS", os.devnull)).glob("*/config.json"))
MEAN_FACTOR, MAX_FACTOR = 1.5, 3.0
LEAST_AGREEMENT = 0.9
"""Of the tokens of an answer, those before the first one that differs from float32's."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_stray_no_further_than_a_cpus(
    family: str, dtype: str, folder_of: Callable[[str], Path], cases_of: Callable[[str], list[Case]]
) -> None:
    folder, cases = folder_of(family), [case for case in cases_of(family) if "prefix_allowed" not in case.rules]
    exact = logprobs(LLM(folder, device="cpu", dtype="float32"), cases)
    rounding = np.abs(logprobs(LLM(folder, device="cpu", dtype=dtype), cases) - exact)
    ours = np.abs(logprobs(LLM(folder, device=DEVICE, dtype=dtype), cases) - exact)
    assert 0 < ours.mean() <= MEAN_FACTOR * rounding.mean(), f"a CPU in {dtype} strays by {rounding.mean()} on average"
    assert ours.max() <= MAX_FACTOR * rounding.max(), f"a CPU in {dtype} strays by {rounding.max()} at most"


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bundled_model_answers_as_in_float32(dtype: str, cases_of: Callable[[str], list[Case]]) -> None:
    cases = cases_of("signpost")
    llm = LLM("signpost", device=DEVICE, dtype=dtype)
    assert answer_all(llm, cases, MAX_TOKENS["signpost"]) == expected_of(cases)
    assert answer_all(llm, cases, MAX_TOKENS["signpost"], steps_between=2) == expected_of(cases)


@pytest.mark.skipif(not REAL, reason="no folder of real checkpoints is given (--models)")
@pytest.mark.parametrize("config", REAL, ids=lambda path: path.parent.name)
def test_a_real_checkpoint_agrees_with_float32(config: Path) -> None:
    reference = Reference(config.parent)
    cases = make_cases(reference.info.family.name, reference)
    answers = answer_all(
        LLM(config.parent, device=DEVICE, dtype="bfloat16"), cases, MAX_TOKENS[reference.info.family.name]
    )
    assert np.mean([agreement(*pair) for pair in zip(answers, expected_of(cases), strict=True)]) >= LEAST_AGREEMENT


def logprobs(llm: LLM, cases: Sequence[Case]) -> npt.NDArray[np.float64]:
    """Of the tokens that float32 answers with, one after the other over all cases, as parts of the prompts."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    prompts = []
    for case in cases:
        prompt = [*case.prompt, *case.expected]
        if case.encoder_prompt is not None:
            prompts.append({"encoder_prompt": case.encoder_prompt, "decoder_prompt": prompt})
        else:
            media = {llm.info.media_kind: case.media} if case.media else {}
            prompts.append({"prompt_token_ids": prompt, "multi_modal_data": media})
    outputs = llm.generate(prompts, params)  # type: ignore[arg-type]
    told = [
        entry.logprob
        for case, output in zip(cases, outputs, strict=True)
        for entry in output.prompt_logprobs[len(output.prompt_logprobs) - len(case.expected) :]
        if entry is not None
    ]
    assert len(told) == sum(len(case.expected) for case in cases) > 0
    return np.array(told)


def agreement(answer: Sequence[int], expected: Sequence[int]) -> float:
    """The share of the expected tokens before the first one that differs."""
    same = [mine == theirs for mine, theirs in zip(answer, expected, strict=False)]
    return (same.index(False) if False in same else len(same)) / max(1, len(expected))
