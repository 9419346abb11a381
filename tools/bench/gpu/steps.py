"""Steps of a decoder, beside the least that they could take: decode by batch against the bytes to read, the prefill
of a long prompt against its products of matrices."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch

from common.model_info import load_model_info
from engine.core.decoder_engine import DecoderEngine
from engine.models.base import DecoderModel
from engine.models.loading.skeleton import without_memory
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
PREFILL_TOKENS, TOY_PREFILL_TOKENS = 8192, 48
PREFILL_GOAL: Final = 0.6
"""Of the rate of a product of matrices."""
TOY_BATCHES, TOY_CONTEXT, TOY_STEPS = (1, 3), 20, 4


def measure_decode(setup: Setup) -> Iterator[Figure]:
    """Yield a figure for each batch: milliseconds of a step, its limit the weights and the keys and values once."""
    batches, context, steps = (TOY_BATCHES, TOY_CONTEXT, TOY_STEPS) if setup.toy else (BATCHES, CONTEXT, STEPS)
    length = context + steps * (setup.repetitions + 1) + 2 * WARM_UP_TOKENS + max(batches)
    options = {"max_num_seqs": max(batches), "max_num_batched_tokens": 8192, "max_model_len": length + 16}
    engine = make_decoder(setup, qwen2_5_vl_3b, **options)
    for batch in batches:
        yield from attempted("decode", f"batch {batch}", measure_steps, setup, engine, batch, context, steps)


def measure_prefill(setup: Setup) -> Iterator[Figure]:
    """Milliseconds from a request to its first token, its limit the arithmetic of all layers."""
    tokens = TOY_PREFILL_TOKENS if setup.toy else PREFILL_TOKENS
    options = {"max_num_seqs": 4, "max_num_batched_tokens": tokens, "max_model_len": tokens + 16}
    engine = make_decoder(setup, qwen2_5_vl_3b, prefix_caching=False, **options)
    driver, rng, numbers = Driver(engine), random.Random(0), itertools.count()

    def prefill() -> None:
        driver.add(f"prefill-{next(numbers)}", random_prompt(tokens, rng), endless(1))
        driver.until(1)
        driver.abort_all()

    seconds = setup.time(prefill)
    flops = prefill_flops(engine.runner.model, tokens)
    rate = flops / min(seconds) / 1e12
    beside = f"{flops / 1e12:.1f} TFLOP, {rate:.0f} TFLOP/s at best, sampling and scheduling included"
    figure = duration("prefill", f"{tokens} tokens", seconds, setup.limits.least_s(0.0, flops), beside, PREFILL_GOAL)
    yield of_decoder(engine).beside(figure)


def prefill_flops(model: DecoderModel, tokens: int) -> float:
    """Of all matrices but embedding and head over every token, of causal attention, and of the head over one token."""
    spec = model.spec
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    inner = sum(size for name, size in sizes.items() if "embed_tokens" not in name and "head" not in name)
    attention = 2.0 * spec.num_layers * spec.num_heads * spec.head_dim * tokens**2  # 2 products, half of each unseen
    return 2.0 * inner * tokens + attention + 2.0 * spec.vocab_size * spec.hidden_size


def measure_steps(setup: Setup, engine: DecoderEngine, batch: int, context: int, steps: int) -> Iterator[Figure]:
    """Yield a decode step of `batch` requests after `context` tokens each, beside the least that reading could take."""
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
    beside = f"{size_bytes / 1e9:.2f} GB to read; {setup.limits.bound(size_bytes, flops)}; {batch} sequences"
    least_s, case = setup.limits.least_s(size_bytes, flops), f"batch {batch}, {tokens} tokens each"
    figure = duration("decode", case, seconds, least_s, beside, GOALS.get(batch))
    yield of_decoder(engine).beside(figure, anew)


def weight_bytes(engine: DecoderEngine) -> int:
    """Return the bytes of an engine's weights that a decode step reads."""
    return _read_bytes(engine.runner.model)


def least_step_s(limits: Limits, folder: Path, dtype: torch.dtype, batch: int) -> float:
    """Return the least that a decode step of a model can take in any engine: its weights once, keys and values left
    out."""
    with without_memory():
        size_bytes = _read_bytes(make_decoder_of(load_model_info(str(folder))).to(dtype))
    return limits.least_s(size_bytes, 2.0 * batch * size_bytes / dtype.itemsize)


def _read_bytes(model: DecoderModel) -> int:
    """Leave out an embedding that is not the head as well: a few of its rows are read."""
    sizes = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    has_head = any(name.endswith("head.weight") for name in sizes)
    return sum(size for name, size in sizes.items() if not (has_head and "embed_tokens" in name))


def token_bytes(engine: DecoderEngine) -> int:
    """Return the bytes of a token's keys and values, over all layers of self-attention."""
    spec, dtype = engine.runner.spec, engine.runner.dtype
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * dtype.itemsize
