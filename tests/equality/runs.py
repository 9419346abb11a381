"""Ways to push cases through an `LLM`, and what must hold while they run."""

from __future__ import annotations

import pkgutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from common.model_info import ModelInfo, load_model_info
from common.sampling_params import SamplingParams
from engine.llm import LLM, Prompt
from engine.state.spec import DecoderSpec
from tests.equality.cases import Case

TIMEOUT_S = 60.0


def at_once_or_staggered(steps_between: int) -> pytest.MarkDecorator:
    """Parametrize `steps_between` of `answer_all`: all requests at once (slow), and one by one, so many steps apart."""
    ways = [pytest.param(0, marks=pytest.mark.slow, id="at once"), pytest.param(steps_between, id="staggered")]
    return pytest.mark.parametrize("steps_between", ways)


def answer_all(
    llm: LLM,
    cases: Sequence[Case],
    max_tokens: int,
    *,
    steps_between: int = 0,
    integrity: bool = True,
    timeout_s: float = TIMEOUT_S,
) -> list[list[int]]:
    """The tokens of every case, without the end-of-sequence token.

    With `steps_between`, requests arrive one by one, so many steps apart: prefill meets decode in every batch.
    Checks after every step that blocks, cache entries and slots add up, and at the end that nothing is left.
    """
    pending, order = list(cases), list[str]()
    answers: dict[str, list[int]] = {}
    deadline_s, step = time.monotonic() + timeout_s, 0
    while len(answers) < len(cases):
        while pending and (not steps_between or step >= steps_between * len(order)):
            case = pending.pop(0)
            order.append(llm.add(prompt_of(llm.info, case), _sampling(case, max_tokens)))
        for output in llm.step():
            answers[output.request_id] = output.outputs[0].token_ids
        step += 1
        if integrity:
            llm.decoder.check_integrity()
        assert time.monotonic() < deadline_s, f"no end after {timeout_s} s: {llm.decoder.stats()}"
    assert llm.decoder.is_empty(), llm.decoder.stats()
    return [strip(llm.info, answers[request_id]) for request_id in order]


def expected_of(cases: Sequence[Case]) -> list[list[int]]:
    return [case.expected for case in cases]


def kv_bytes(info: ModelInfo, num_blocks: int, block_size: int) -> int:
    """A KV budget in fp32 of exactly so many blocks."""
    with torch.device("meta"):
        spec: DecoderSpec = pkgutil.resolve_name(info.family.decoder)(info).spec
    return 2 * spec.num_caches * num_blocks * block_size * spec.num_kv_heads * spec.head_dim * 4


def llm_of_blocks(folder: Path, num_blocks: int, block_size: int, **options: Any) -> LLM:
    """An `LLM` whose KV cache has exactly so many blocks."""
    kv_cache_bytes = kv_bytes(load_model_info(str(folder)), num_blocks, block_size)
    return LLM(folder, block_size=block_size, kv_cache_bytes=kv_cache_bytes, **options)


def prompt_of(info: ModelInfo, case: Case) -> Prompt:
    if case.encoder_prompt is not None:
        images: dict[str, Any] = {"multi_modal_data": {"image": case.media}} if case.media else {}
        encoder: Any = {"prompt_token_ids": case.encoder_prompt, **images}
        return {"encoder_prompt": encoder, "decoder_prompt": case.decoder_prompt}
    media: dict[str, Any] = {info.media_kind: case.media} if info.media_kind and case.media else {}
    return {"prompt_token_ids": case.prompt, "multi_modal_data": media}


def _sampling(case: Case, max_tokens: int) -> SamplingParams:
    prefix = len(case.rules.get("prefix_allowed", ()))
    return SamplingParams(**{**case.rules, "temperature": 0.0, "max_tokens": max_tokens + prefix})


def strip(info: ModelInfo, tokens: list[int]) -> list[int]:
    """Without the end-of-sequence token if it is the last one."""
    return tokens[:-1] if tokens and tokens[-1] in info.eos_token_ids else tokens
