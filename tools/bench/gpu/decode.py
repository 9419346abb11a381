"""A decode step of a Qwen2.5-VL-3B, by batch: against the bytes that it has to read, at the speed of a copy."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

import torch

from common.model_info import load_model_info
from engine.core.decoder_engine import DecoderEngine
from engine.models.base import DecoderModel
from engine.models.registry import make_decoder as make_decoder_of
from tools.bench.gpu.attention import of_decoder
from tools.bench.gpu.engines import WARM_UP_TOKENS, Driver, endless, make_decoder, random_prompt
from tools.bench.gpu.figures import Figure, duration
from tools.bench.gpu.setup import Limits, Setup, attempted
from tools.gpu_check.shapes import qwen2_5_vl_3b

BATCHES: Final = (1, 8, 64, 256)
CONTEXT: Final = 512
STEPS: Final = 32
"""In one measurement."""
GOALS: Final = {1: 0.8, 8: 0.8}
"""Shares of the limit by batch."""
TOY_BATCHES, TOY_CONTEXT, TOY_STEPS = (1, 3), 20, 4
_HEADS: Final = ("head.weight", "proj_out.weight")
_UNREAD: Final = frozenset({"embed_positions", "cross_kv_proj", "kv_proj"})
"""Parts of models' names; the last one is Mllama's `cross_kv_proj`."""


def measure(setup: Setup) -> Iterator[Figure]:
    """One figure for each batch: milliseconds of a step, its limit the weights and the keys and values once."""
    batches, context, steps = (TOY_BATCHES, TOY_CONTEXT, TOY_STEPS) if setup.toy else (BATCHES, CONTEXT, STEPS)
    length = context + steps * (setup.repetitions + 1) + 2 * WARM_UP_TOKENS + max(batches)
    options = {"max_num_seqs": max(batches), "max_num_batched_tokens": 8192, "max_model_len": length + 16}
    engine = make_decoder(setup, qwen2_5_vl_3b, **options)
    for batch in batches:
        part = partial(_measure_batch, setup, engine, batch, context, steps)
        yield from attempted("decode", f"batch {batch}", part)


def _measure_batch(setup: Setup, engine: DecoderEngine, batch: int, context: int, steps: int) -> Iterator[Figure]:
    yield measure_steps(setup, engine, batch, context, steps, "decode", f"batch {batch}", GOALS.get(batch))


def measure_steps(
    setup: Setup,
    engine: DecoderEngine,
    batch: int,
    context: int,
    steps: int,
    benchmark: str,
    case: str,
    goal: float | None = None,
) -> Figure:
    """A decode step of `batch` requests after `context` tokens each, beside the least that reading could take: `goal`
    is the share of that which is to be reached."""
    rng = random.Random(batch)
    # Not all begin in the same step: those that do so first must not end before the others.
    params = endless(steps * (setup.repetitions + 1) + 2 * WARM_UP_TOKENS + batch)
    with Driver(engine) as driver:
        for number in range(batch):
            driver.add(f"decode-{batch}-{number}", random_prompt(context, rng), params)
        driver.until(WARM_UP_TOKENS)
        seconds, anew = driver.time_steps(setup, steps)
    tokens = context + steps * (setup.repetitions + 1) // 2  # in the middle of what was measured
    size_bytes = weight_bytes(engine) + batch * tokens * token_bytes(engine)
    flops = 2.0 * batch * weight_bytes(engine) / engine.runner.dtype.itemsize
    least_s = setup.limits.least_s(size_bytes, flops)
    beside = f"{size_bytes / 1e9:.2f} GB to read; {setup.limits.bound(size_bytes, flops)}; {batch} sequences"
    figure = duration(benchmark, f"{case}, {tokens} tokens each", seconds, least_s, beside, goal)
    return of_decoder(engine).with_steps_anew(anew).of(figure)


def weight_bytes(engine: DecoderEngine) -> int:
    """What a decode step reads of the weights of an engine."""
    return _read_bytes(engine.runner.model)


def least_step_s(limits: Limits, folder: Path, dtype: torch.dtype, batch: int) -> float:
    """The least that a decode step of a model can take in any engine: its weights once, keys and values left out."""
    size_bytes = _read_bytes(make_decoder_of(load_model_info(str(folder))).to(dtype))
    return limits.least_s(size_bytes, 2.0 * batch * size_bytes / dtype.itemsize)


def _read_bytes(model: DecoderModel) -> int:
    """Of positions, and of an embedding that is not the head as well, a few rows at most are read, and nothing of what
    makes keys and values of encoder outputs, once for each of these."""
    sizes = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    has_head = any(name.endswith(_HEADS) for name in sizes)
    unread = {*_UNREAD, "embed_tokens"} if has_head else _UNREAD
    return sum(size for name, size in sizes.items() if unread.isdisjoint(name.split(".")))


def token_bytes(engine: DecoderEngine) -> int:
    """The keys and values of one token, over all layers of self-attention."""
    spec, dtype = engine.runner.spec, engine.runner.dtype
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * dtype.itemsize
