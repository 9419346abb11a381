"""The prefill of a long prompt by a Qwen2.5-VL-3B, in one step: against the rate of a product of matrices."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Final

from engine.models.base import DecoderModel
from tools.bench.gpu.attention import of_decoder
from tools.bench.gpu.engines import Driver, endless, make_decoder, random_prompt
from tools.bench.gpu.figures import Figure, duration
from tools.bench.gpu.setup import Setup
from tools.gpu_check.shapes import qwen2_5_vl_3b

TOKENS: Final = 8192
TOY_TOKENS: Final = 48
GOAL: Final = 0.6
"""Of the rate of a product of matrices."""


def measure(setup: Setup) -> Iterator[Figure]:
    """Milliseconds from a request to its first token, its limit the arithmetic of all layers."""
    tokens = TOY_TOKENS if setup.toy else TOKENS
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
    figure = duration("prefill", f"{tokens} tokens", seconds, setup.limits.least_s(0.0, flops), beside, GOAL)
    yield of_decoder(engine).beside(figure)


def prefill_flops(model: DecoderModel, tokens: int) -> float:
    """Of all matrices but embedding and head over every token, of causal attention, and of the head over one token."""
    spec = model.spec
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    inner = sum(size for name, size in sizes.items() if "embed_tokens" not in name and "head" not in name)
    attention = 2.0 * spec.num_layers * spec.num_heads * spec.head_dim * tokens**2  # 2 products, half of each unseen
    return 2.0 * inner * tokens + attention + 2.0 * spec.vocab_size * spec.hidden_size
