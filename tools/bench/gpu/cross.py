"""Cross-attention in a decode step of a Whisper large-v3: its bandwidth, and what a kept plan saves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Final

import torch

from common.messages import Grant, InputLayout, InputSlot, Offer
from engine.core.decoder_engine import DecoderEngine
from engine.device.gpu_memory import in_words
from tools.bench.gpu.attention import of_decoder
from tools.bench.gpu.decode import GOALS, token_bytes, weight_bytes
from tools.bench.gpu.engines import DEADLINE_S, WARM_UP_TOKENS, Driver, endless, make_decoder
from tools.bench.gpu.figures import Figure, duration
from tools.bench.gpu.setup import Setup, attempted
from tools.gpu_check.shapes import whisper_large_v3

BATCHES: Final = (1, 8, 64, 256)
STEPS: Final = 16
TOY_BATCHES, TOY_STEPS = (1, 2), 2
PROMPT: Final = (391, 10, 11, 12)
MEMORY_FRACTION: Final = 0.9
"""There is one engine, and a clip takes a quarter of a gigabyte."""
_FAR_S: Final = 1e12


def measure(setup: Setup) -> Iterator[Figure]:
    """One figure for each batch of clips that are all different: weights, self and cross keys and values once."""
    batches, steps = (TOY_BATCHES, TOY_STEPS) if setup.toy else (BATCHES, STEPS)
    options = {"max_num_seqs": max(batches), "max_num_batched_tokens": 2048}
    engine = make_decoder(setup, whisper_large_v3, memory_fraction=MEMORY_FRACTION, **options)
    for batch in batches:
        yield from attempted("cross", f"{batch} clips", partial(_measure_batch, setup, engine, batch, steps))


def _measure_batch(setup: Setup, engine: DecoderEngine, batch: int, steps: int) -> Iterator[Figure]:
    yield measure_clips(setup, engine, batch, steps, "cross", f"{batch} clips", GOALS.get(batch))


def measure_clips(
    setup: Setup,
    engine: DecoderEngine,
    batch: int,
    steps: int,
    benchmark: str,
    case: str,
    goal: float | None = None,
) -> Figure:
    """A decode step of `batch` requests with a clip each, beside the least that reading could take.

    Raises MemoryError where the device has no room for so many.
    """
    num_tokens = steps * (setup.repetitions + 1) + 2 * WARM_UP_TOKENS
    _check_room(engine, batch, num_tokens)
    with Driver(engine) as driver:
        add_clips(driver, batch, num_tokens)
        driver.until(WARM_UP_TOKENS)
        seconds, anew = driver.time_steps(setup, steps)
    tokens = len(PROMPT) + num_tokens // 2
    rows = engine.info.max_encoder_tokens
    cross_bytes = batch * rows * _cross_token_bytes(engine)
    size_bytes = weight_bytes(engine) + cross_bytes + batch * tokens * token_bytes(engine)
    beside = f"{size_bytes / 1e9:.2f} GB to read, {cross_bytes / 1e9:.2f} of them by cross-attention"
    least_s = setup.limits.least_s(size_bytes)
    figure = duration(benchmark, f"{case} of {rows} rows", seconds, least_s, beside, goal)
    return of_decoder(engine).with_steps_anew(anew).of(figure)


def add_clips(driver: Driver, batch: int, num_tokens: int) -> None:
    """Requests with a clip of its own each, whose encoder outputs are random and come all at once: none has decoded
    much before the last one begins. Raises TimeoutError if they are not granted."""
    engine = driver.engine
    rows, width = engine.info.max_encoder_tokens, engine.runner.spec.encoder_width
    outputs = {
        f"cross-{batch}-{number}": torch.randn(rows, width, dtype=engine.runner.dtype, device=engine.runner.device)
        for number in range(batch)
    }
    dtype = str(engine.runner.dtype).removeprefix("torch.")
    for name, output in outputs.items():
        sizes = [rows, width], dtype, output.nbytes, InputLayout(rows, [], None)
        driver.num_tokens[name] = 0
        engine.add_request(name, list(PROMPT), [InputSlot(0, "audio", name, None)], endless(num_tokens))
        engine.offer(Offer(name, 0, 0, name, "audio", *sizes, "", _FAR_S))
    waiting, deadline_s = set(outputs), time.monotonic() + DEADLINE_S
    while waiting:
        waiting -= {
            event.request_id for event in driver.step() if isinstance(event, Grant) and event.status == "granted"
        }
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{len(waiting)} of {batch} clips are not granted after {DEADLINE_S:.0f} s")
    for name, output in outputs.items():
        engine.deliver(name, 0, 0, output)


def _check_room(engine: DecoderEngine, batch: int, num_tokens: int) -> None:
    """Raise MemoryError unless the blocks of so many requests fit into the pool at once."""
    blocks, rows = engine.blocks, engine.info.max_encoder_tokens
    each = blocks.blocks_for(rows) + blocks.blocks_for(len(PROMPT) + num_tokens + 1)
    if batch * each > blocks.pool.num_usable:
        needed, there = (in_words(n * engine.runner.block_bytes) for n in (batch * each, blocks.pool.num_usable))
        raise MemoryError(f"{batch} clips take {needed} of keys and values, there is room for {there}")


def _cross_token_bytes(engine: DecoderEngine) -> int:
    """The cross-attention keys and values of one row of an encoder output, over all layers."""
    spec, dtype = engine.runner.spec, engine.runner.dtype
    return 2 * spec.num_cross_layers * spec.num_kv_heads * spec.head_dim * dtype.itemsize
