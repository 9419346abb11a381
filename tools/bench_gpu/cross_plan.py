"""Cross-attention alone, all layers of a Whisper large-v3 decoding, on the path that serves: a plan at fixed addresses
and, on a GPU, a CUDA graph of the layers.

Apart: the layers (what the device does), the plan (what the host does), and both together with the plan of the step
before and with a new one for every step.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

from engine.attention.backend import AttentionBackend, DecodePlan
from engine.attention.metadata import AttentionMetadata
from engine.attention.select import choose_backend
from engine.device.recorder import CudaRecorder, PlainRecorder
from engine.state.spec import HeadSpec
from tools.bench_gpu.attempts import attempted
from tools.bench_gpu.attention import Attention, of_backend
from tools.bench_gpu.setup import Setup
from tools.gpu_check.figures import Figure, duration, ratio

STEPS: Final = 8


@dataclass(frozen=True)
class Sizes:
    """Of the attention; `rows` of an encoder output belong to each request."""

    batch: int
    layers: int
    heads: int
    head_dim: int
    rows: int
    block_size: int = 16

    @property
    def num_blocks(self) -> int:
        """Of one request."""
        return -(-self.rows // self.block_size)

    def __str__(self) -> str:
        return f"{self.batch} clips, {self.layers} layers"


LARGE: Final = tuple(Sizes(batch, layers=32, heads=20, head_dim=64, rows=1500) for batch in (1, 8, 32))
TOY: Final = (Sizes(batch=2, layers=2, heads=4, head_dim=64, rows=40),)


def measure(setup: Setup) -> Iterator[Figure]:
    """Four figures for each batch; the limit of all but the plan is reading the keys and values once."""
    for sizes in TOY if setup.toy else LARGE:
        yield from attempted("cross_plan", str(sizes), partial(_measure_sizes, setup, sizes))


@torch.inference_mode()
def _measure_sizes(setup: Setup, sizes: Sizes) -> list[Figure]:
    one, other = (_metadata(sizes, first, setup.device) for first in (0, sizes.batch))
    plan, layers, attention = _record(setup, sizes, one)

    def step(metadata: AttentionMetadata) -> None:
        plan.update(metadata)
        layers()

    turns = itertools.cycle((one, other))  # two batches in turn: no plan fits twice in a row
    layers_s = setup.time(layers, calls=STEPS)
    plan_s = [_mean_s(lambda: plan.update(next(turns)), setup.device) for _ in range(setup.repetitions)]
    kept_s = setup.time(lambda: step(one), calls=STEPS)
    new_s = setup.time(lambda: step(next(turns)), calls=STEPS)
    size_bytes = 2 * sizes.layers * sizes.batch * sizes.rows * sizes.heads * sizes.head_dim * 2
    least_s, beside = setup.limits.least_s(size_bytes), f"{size_bytes / 1e9:.2f} GB to read"
    saved = f"{beside}; {ratio(kept_s, new_s)} a new plan's"
    figures = [
        duration("cross_plan", f"{sizes}, the layers alone", layers_s, least_s, beside),
        duration("cross_plan", f"{sizes}, a plan alone", plan_s, beside="host time, its copies waited for"),
        duration("cross_plan", f"{sizes}, a step, plan kept", kept_s, least_s, saved),
        duration("cross_plan", f"{sizes}, a step, plan made anew", new_s, least_s, beside),
    ]
    return [attention.of(figure) for figure in figures]


def _record(
    setup: Setup, sizes: Sizes, metadata: AttentionMetadata
) -> tuple[DecodePlan, Callable[[], Tensor], Attention]:
    """A plan brought to a batch, what runs all layers with it (on a GPU a recorded graph), and whose they are."""
    device, dtype, heads = setup.device, torch.bfloat16, HeadSpec(sizes.heads, sizes.heads, sizes.head_dim)
    backend = choose_backend(device, dtype, "auto" if device.type == "cuda" else "torch", heads)
    shape = (2, 2 * sizes.batch * sizes.num_blocks + 1, sizes.block_size, sizes.heads, sizes.head_dim)
    caches = [torch.randn(shape, device=device, dtype=dtype) for _ in range(sizes.layers)]
    query = torch.randn(sizes.batch, sizes.heads, sizes.head_dim, device=device, dtype=dtype)
    plan = backend.make_decode_plan(sizes.batch, sizes.num_blocks, sizes.block_size, dtype, heads, causal=False)
    if plan is None:
        raise RuntimeError(f"attention backend {backend.name} has no plan at fixed addresses")
    plan.update(metadata)
    recorder = CudaRecorder(device) if device.type == "cuda" else PlainRecorder()
    replay = recorder.record(partial(_run_layers, backend, caches, query, plan))
    return plan, replay, of_backend(backend, heads, dtype)


def _run_layers(backend: AttentionBackend, caches: Sequence[Tensor], query: Tensor, plan: DecodePlan) -> Tensor:
    for cache in caches:
        out = backend.run(query, cache, plan)
    return out


def _mean_s(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of the host, by a clock: events of the device would not see what it does not wait for."""
    began_s = time.perf_counter()
    for _ in range(STEPS):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began_s) / STEPS


def _metadata(sizes: Sizes, first: int, device: torch.device) -> AttentionMetadata:
    """Decodes of so many requests, each with blocks of its own; request `first` has the first ones."""
    blocks = np.arange(sizes.batch * sizes.num_blocks, dtype=np.int64) + first * sizes.num_blocks + 1
    table = blocks.reshape(sizes.batch, sizes.num_blocks)
    return AttentionMetadata(
        query_start_loc=list(range(sizes.batch + 1)),
        seq_lens=[sizes.rows] * sizes.batch,
        block_table=torch.from_numpy(table).to(device),
        block_lists=table.tolist(),
        slot_mapping=None,
        causal=False,
        num_decodes=sizes.batch,
        host_table=table,
    )
