"""Cross-attention in a decode step of a Whisper large-v3: its bandwidth, and what a kept plan saves."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

import torch

from common.messages import InputLayout, InputSlot
from engine.decoder_engine import DecoderEngine
from engine.events import InputGranted, InputMetadata
from launch.gpu.bench.attempts import attempted
from launch.gpu.bench.decode import token_bytes, weight_bytes
from launch.gpu.bench.engines import WARM_UP_TOKENS, Driver, endless, make_decoder
from launch.gpu.bench.setup import Setup
from launch.gpu.figures import Figure, duration
from launch.gpu.shapes import whisper_large_v3

BATCHES: Final = (1, 8, 32)
STEPS: Final = 16
TOY_BATCHES, TOY_STEPS = (1, 2), 2
PROMPT: Final = (391, 10, 11, 12)
_FAR_S: Final = 1e12


def measure(setup: Setup) -> Iterator[Figure]:
    """One figure for each batch of clips that are all different: weights, self and cross keys and values once."""
    batches, steps = (TOY_BATCHES, TOY_STEPS) if setup.toy else (BATCHES, STEPS)
    engine = make_decoder(setup, whisper_large_v3, max_num_seqs=max(batches), max_num_batched_tokens=2048)
    for batch in batches:
        yield from attempted("cross", f"{batch} clips", partial(_measure_batch, setup, engine, batch, steps))


def _measure_batch(setup: Setup, engine: DecoderEngine, batch: int, steps: int) -> Iterator[Figure]:
    yield measure_clips(setup, engine, batch, steps, "cross", f"{batch} clips")


def measure_clips(setup: Setup, engine: DecoderEngine, batch: int, steps: int, benchmark: str, case: str) -> Figure:
    """A decode step of `batch` requests with a clip each, beside the least that reading could take."""
    num_tokens = steps * (setup.repetitions + 1) + 2 * WARM_UP_TOKENS
    with Driver(engine) as driver:
        for number in range(batch):
            add_clip(driver, f"cross-{batch}-{number}", num_tokens)
        driver.until(WARM_UP_TOKENS)
        seconds = setup.time(driver.step, calls=steps)
    tokens = len(PROMPT) + num_tokens // 2
    rows = engine.info.max_encoder_tokens
    cross_bytes = batch * rows * _cross_token_bytes(engine)
    size_bytes = weight_bytes(engine) + cross_bytes + batch * tokens * token_bytes(engine)
    beside = f"{size_bytes / 1e9:.2f} GB to read, {cross_bytes / 1e9:.2f} of them by cross-attention"
    return duration(benchmark, f"{case} of {rows} rows", seconds, setup.limits.least_s(size_bytes), beside)


def add_clip(driver: Driver, name: str, num_tokens: int) -> None:
    """A request with a clip of its own, whose encoder output is random and comes at once."""
    engine = driver.engine
    rows, width = engine.info.max_encoder_tokens, engine.runner.spec.encoder_width
    output = torch.randn(rows, width, dtype=engine.runner.dtype, device=engine.runner.device)
    dtype = str(engine.runner.dtype).removeprefix("torch.")
    metadata = InputMetadata((rows, width), dtype, output.nbytes, InputLayout(rows, [], None), name)
    driver.num_tokens[name] = 0
    engine.add_request(name, list(PROMPT), [InputSlot(0, "audio", name, None)], endless(num_tokens))
    engine.offer(name, 0, 0, metadata, _FAR_S)
    while not any(isinstance(event, InputGranted) and event.request_id == name for event in driver.step()):
        pass
    engine.deliver(name, 0, 0, output)


def _cross_token_bytes(engine: DecoderEngine) -> int:
    """The cross-attention keys and values of one row of an encoder output, over all layers."""
    spec, dtype = engine.runner.spec, engine.runner.dtype
    return 2 * spec.num_cross_layers * spec.num_kv_heads * spec.head_dim * dtype.itemsize
