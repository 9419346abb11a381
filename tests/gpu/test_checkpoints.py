"""Real checkpoints on the GPU: greedy answers as in float32 wherever that is sure of them, and a cluster's as those of
one process in the same dtype."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.sampling_params import SamplingParams
from common.text import whisper_prompt
from common.text.processor import TextProcessor
from engine.llm import LLM
from tests.equality.cases import Case, make_cases
from tests.equality.media import recording
from tests.equality.references import Reference
from tests.equality.runs import answer_all
from tests.gpu import fast_path
from tests.gpu.device import DEVICE, needs_gpu
from tests.gpu.test_cluster import check
from tests.gpu.test_engine import check_strayed, logprobs

MODELS = "TRIPTYCH_GPU_MODELS"
"""The variable that names the folder of real checkpoints."""
FOLDERS = sorted(path.parent for path in Path(os.environ[MODELS]).glob("*/config.json")) if MODELS in os.environ else []
pytestmark = [
    *needs_gpu,
    pytest.mark.skipif(not FOLDERS, reason=f"{MODELS} names no folder of checkpoints"),
]
DTYPE = "bfloat16"
POOLS: dict[str, Any] = {
    "kv_cache_bytes": 256 * 2**20,
    "encoder_cache_bytes": 32 * 2**20,
    "swap_bytes": 0,
    "memory_fraction": 0.2,  # engines and clusters of one test share the GPU
}
MAX_TOKENS = 24
QUESTIONS = ("What is the capital of France?", "Name three colours.", "Count from one to ten.", "Write a short poem.")
RECORDINGS = ("dashwood.flac", "amiable.wav")
MARGIN_FACTOR = 4.0
"""Another token is as good where float32 prefers its own by no more than so many of a CPU's errors in this dtype."""


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_greedy_answers_are_those_of_float32_wherever_it_is_sure(folder: Path) -> None:
    cases = cases_of(Reference(folder))
    # One engine after the other: those of a process preprocess media for the dtype of the last one.
    half, exact = (logprobs(LLM(folder, device="cpu", dtype=dtype, **POOLS), cases) for dtype in (DTYPE, "float32"))
    llm = LLM(folder, device=DEVICE, dtype=DTYPE, **POOLS, **fast_path.flashinfer_for(DTYPE))
    fast_path.check_encoder(llm)
    rounding, strayed = np.abs(half - exact), np.abs(logprobs(llm, cases) - exact)
    check_strayed(strayed, rounding)
    answers = answer_all(llm, cases, MAX_TOKENS)
    judge = LLM(folder, device="cpu", dtype="float32", **POOLS)
    for case, answer in zip(cases, answers, strict=True):
        parted = [one != other for one, other in zip(answer, case.expected, strict=False)]
        if True in parted:
            first = parted.index(True)
            assert preference(judge, case, first, answer[first]) <= MARGIN_FACTOR * rounding.max()


@pytest.mark.cluster
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
async def test_a_cluster_answers_as_one_process(folder: Path, broker_url: str) -> None:
    """Requests come one at a time: equal batches have equal logits."""
    reference = Reference(folder)
    topology = "1pd" if reference.info.media_kind is None else "1e1pd"
    await check(folder, topology, cases_of(reference), MAX_TOKENS, broker_url, DTYPE, **POOLS)


def cases_of(reference: Reference) -> list[Case]:
    """Questions, recorded speech or pictures, with what float32 answers."""
    if reference.info.media_kind == "audio":
        return [speech_case(reference, name) for name in RECORDINGS]
    if reference.info.media_kind is not None:
        return make_cases(reference.info.family.name, reference)
    text, cases = TextProcessor(reference.info), []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        prompt = text.render_chat(messages)
        cases.append(Case(prompt, reference.generate(prompt, MAX_TOKENS), http={"messages": messages}))
    return cases


def speech_case(reference: Reference, name: str) -> Case:
    media, samples = recording(name)
    prompt, rules = whisper_prompt.build(reference.info, TextProcessor(reference.info), language=english(reference))
    options = {} if english(reference) is None else {"language": "en", "task": "transcribe"}
    expected = reference.transcribe(samples, MAX_TOKENS, **options)
    http = {"file": (name, media, "audio/flac"), **({"language": "en"} if options else {})}
    return Case(prompt, expected, [media], rules, http)


def english(reference: Reference) -> str | None:
    """The language that a multilingual checkpoint has to be told; one for English alone takes none."""
    return "en" if whisper_prompt.is_multilingual(reference.info) else None


def preference(exact: LLM, case: Case, position: int, token: int) -> float:
    """By how much float32 likes its own token there better than another one, in log-probabilities."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    media: dict[str, Sequence[bytes]] = {exact.info.media_kind: case.media} if exact.info.media_kind else {}
    prompts: Any = [
        {"prompt_token_ids": [*case.prompt, *case.expected[:position], one], "multi_modal_data": media}
        for one in (case.expected[position], token)
    ]
    own, other = (output.prompt_logprobs[-1] for output in exact.generate(prompts, params))
    return own.logprob - other.logprob  # type: ignore[union-attr]
