"""The engine as it runs on a GPU by default (FlashInfer, recorded steps, a step ahead), and with FlashInfer
alone; what both answer a batch of prompts, and what float32 thinks of it.

To rehearse on a CPU, FlashInfer's kernels are a fake's, and recorded work is done again by calling it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch

from common.sampling_params import SamplingParams
from engine.attention.select import BACKENDS
from engine.device.choice import DTYPES
from engine.encoders.attention import FLASH_NAME
from engine.llm import LLM, Prompt
from engine.sampling.sampler import Sampler, choose_on_device
from tests.engine.device.host_waits import HostWaits
from tests.equality.cases import Case
from tests.fake_flashinfer.installed import flashinfer_on_cpu
from tests.gpu.device import DEVICE
from tests.plain_recorder import PlainRecorder

BATCHES = (1, 2, 4, 8)
NUM_TOKENS = 12
OPTIONS: dict[str, Any] = {
    "device": DEVICE,
    "max_num_seqs": max(BATCHES),
    "kv_cache_bytes": 32 * 2**20,
    "encoder_cache_bytes": 8 * 2**20,
    "swap_bytes": 0,
    "memory_fraction": 0.2,
}
"""Two engines share the device, and stages of the check run beside each other."""
_BY_NAME: dict[str, Any] = {"attention_backend": "flashinfer"}
"""Whoever asks for it by its name is refused where its kernels do not run; who leaves the choice to the engine gets
PyTorch's then, and a line in the log."""


@contextmanager
def fast_llm(folder: Path, dtype: str, **options: Any) -> Iterator[LLM]:
    """With the settings that a GPU has by default, and others on top."""
    with flashinfer_here() as backend:
        ahead = {} if DEVICE == "cuda" else {"async_scheduling": True}
        llm = LLM(folder, dtype=dtype, **OPTIONS, **backend, **ahead, **options)
        if DEVICE != "cuda" and not options.get("enforce_eager"):
            llm.decoder.runner.record_graphs(PlainRecorder())
        check_encoder(llm)
        yield llm


@contextmanager
def plain_llm(folder: Path, dtype: str) -> Iterator[LLM]:
    """One step after the other, each launched kernel by kernel."""
    with flashinfer_here() as backend:
        llm = LLM(folder, dtype=dtype, **OPTIONS, **backend, enforce_eager=True, async_scheduling=False)
        check_encoder(llm)
        yield llm


@contextmanager
def flashinfer_here() -> Iterator[dict[str, Any]]:
    """Within the block engines in half precision compute with FlashInfer, given these options, or are refused."""
    with nullcontext() if DEVICE == "cuda" else flashinfer_on_cpu():
        yield _BY_NAME


def flashinfer_for(dtype: str) -> dict[str, Any]:
    """Options of engines that may be in other processes, which have no fake: FlashInfer or nothing on a GPU, where it
    serves this dtype."""
    return _BY_NAME if DEVICE == "cuda" and DTYPES[dtype] in BACKENDS["flashinfer"].dtypes else {}


def check_encoder(llm: LLM) -> None:
    """Attention without masks of an encoder in half precision is FlashInfer's on a GPU: an encoder is refused nothing,
    it takes PyTorch's where the kernels do not run."""
    unmasked = None if llm.encoder is None else llm.encoder.encoder.unmasked
    if unmasked is not None:
        name = unmasked.config._attn_implementation
        assert name.startswith(FLASH_NAME) == (DEVICE == "cuda"), f"the encoder's attention is {name}"


@dataclass(frozen=True)
class Answers:
    """Of a batch: tokens of each prompt and, where they were asked for, their log-probabilities [num_prompts,
    num_tokens]; `most_common` is the number of sequences that most decode steps had."""

    tokens: list[list[int]]
    logprobs: npt.NDArray[np.float64]
    most_common: int


def batch_of(cases: Sequence[Case], size: int) -> list[Case]:
    """So many cases, the same again where there are fewer."""
    return list(islice(cycle(cases), size))


def answer(llm: LLM, cases: Sequence[Case], **options: Any) -> Answers:
    """All at once: prompts are short, so that they are prefilled together and decoded together.

    The placeholder of media is no answer: it could not be read as a part of a prompt.
    """
    fields: dict[str, Any] = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **options}
    params = SamplingParams(**fields, suppress_tokens=_placeholders(llm))
    sizes: Counter[int] = Counter()
    with around(llm.decoder.runner, "run", lambda step, *_: note(step, sizes)):
        outputs = llm.generate([prompt_of(llm, case) for case in cases], params)
    answers = [output.outputs[0] for output in outputs]
    told = [[entry.logprob for entry in one.logprobs] for one in answers]
    return Answers([one.token_ids for one in answers], np.array(told), sizes.most_common(1)[0][0])


def note(step: Any, sizes: Counter[int]) -> AbstractContextManager[None]:
    if len(step.sequences) == sum(step.num_tokens):
        sizes[len(step.sequences)] += 1
    return nullcontext()


def prompt_of(llm: LLM, case: Case, answer: Sequence[int] = ()) -> Prompt:
    """The prompt of a case, with a part of an answer to it."""
    prompt = [*case.prompt, *answer]
    if case.encoder_prompt is not None:
        return {"encoder_prompt": case.encoder_prompt, "decoder_prompt": prompt}
    media: dict[str, Any] = {llm.info.media_kind: case.media} if llm.info.media_kind and case.media else {}
    return {"prompt_token_ids": prompt, "multi_modal_data": media}


@dataclass(frozen=True)
class Opinion:
    """What a model thinks of answers, each token after those before it: log-probabilities [num_prompts, num_tokens],
    and by how much the likeliest token is likelier than the next one."""

    logprobs: npt.NDArray[np.float64]
    margins: npt.NDArray[np.float64]


def opinion(llm: LLM, cases: Sequence[Case], answers: Sequence[Sequence[int]]) -> Opinion:
    """Answers of equal length, read as parts of their prompts."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=3)
    prompts = [prompt_of(llm, case, tokens) for case, tokens in zip(cases, answers, strict=True)]
    rows = []
    for output, tokens in zip(llm.generate(prompts, params), answers, strict=True):
        rows.append([entry for entry in output.prompt_logprobs[-len(tokens) :] if entry is not None])
    logprobs = [[entry.logprob for entry in row] for row in rows]
    margins = [[_margin(entry.top, _placeholders(llm)) for entry in row] for row in rows]
    return Opinion(np.array(logprobs), np.array(margins))


def opinions(llm: LLM, batches: Sequence[Sequence[Case]], *answers: Sequence[Answers]) -> list[list[Opinion]]:
    """Of each batch, of each of its answers."""
    return [
        [opinion(llm, batch, one.tokens) for one in of_batch]
        for batch, *of_batch in zip(batches, *answers, strict=True)
    ]


def errors(
    logprobs: Sequence[npt.NDArray[np.float64]], known: Sequence[Sequence[Opinion]], which: int
) -> npt.NDArray[np.float64]:
    """How far log-probabilities of each batch stray from those known of answers number `which`, all in a row."""
    pairs = zip(logprobs, known, strict=True)
    return np.concatenate([np.abs(mine - theirs[which].logprobs).ravel() for mine, theirs in pairs])


def _margin(top: Sequence[tuple[int, float]], suppressed: Sequence[int]) -> float:
    best, second, *_ = [logprob for token, logprob in top if token not in suppressed]
    return best - second


def _placeholders(llm: LLM) -> tuple[int, ...]:
    """Those that could be an answer: Mllama's has no place in the output."""
    token = llm.info.placeholder_token_id
    return () if token is None or token >= llm.decoder.runner.spec.vocab_size else (token,)


def differences(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Where answers part: (prompt, first token that is another one)."""
    for prompt, (one, other) in enumerate(zip(first, second, strict=True)):
        different = [position for position, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]]
        if different:
            yield prompt, different[0]


@contextmanager
def without_waiting(llm: LLM) -> Iterator[None]:
    """Raises where the host waits for the device while a step is launched or its tokens are chosen."""
    with around(llm.decoder.runner, "run", guard), around(llm.decoder.decoding, "launch", guard):
        yield


def guard(*_: object) -> AbstractContextManager[None]:
    return _guard_cuda() if DEVICE == "cuda" else _guard_cpu()


@contextmanager
def _guard_cuda() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def _guard_cpu() -> Iterator[None]:
    waits = HostWaits()
    # A CPU chooses by looking, which is quicker there.
    choose = mock.patch.object(Sampler, "_choose", lambda _, scores, sequences: choose_on_device(scores, sequences))
    with choose, waits:
        yield
    if waits.found:
        raise RuntimeError(f"the host would wait: {sorted(waits.found)}")


@contextmanager
def around(owner: Any, name: str, make: Callable[..., AbstractContextManager[None]]) -> Iterator[None]:
    """Calls of a method run within what `make` gives for their arguments."""
    method = getattr(owner, name)

    def wrapped(*args: Any) -> Any:
        with make(*args):
            return method(*args)

    with mock.patch.object(owner, name, wrapped):
        yield
