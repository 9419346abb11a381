"""Cross-attention alone, all layers of a Whisper large-v3 decoding: with the plan of the step before, and with a new
one for every step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from engine.attention.backend import AttentionBackend
from engine.attention.metadata import AttentionMetadata
from engine.attention.select import choose_backend
from launch.gpu.bench.setup import Setup
from launch.gpu.figures import Figure, duration, ratio

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


LARGE: Final = tuple(Sizes(batch, layers=32, heads=20, head_dim=64, rows=1500) for batch in (1, 8, 32))
TOY: Final = (Sizes(batch=2, layers=2, heads=4, head_dim=64, rows=40),)


def measure(setup: Setup) -> list[Figure]:
    """Two figures for each batch; the limit of both is reading the keys and values once."""
    return [figure for sizes in (TOY if setup.toy else LARGE) for figure in _measure_sizes(setup, sizes)]


@torch.inference_mode()
def _measure_sizes(setup: Setup, sizes: Sizes) -> list[Figure]:
    device, dtype = setup.device, torch.bfloat16
    backend = choose_backend(device, dtype, head_dim=sizes.head_dim)
    shape = (2, 2 * sizes.batch * sizes.num_blocks + 1, sizes.block_size, sizes.heads, sizes.head_dim)
    caches = [torch.randn(shape, device=device, dtype=dtype) for _ in range(sizes.layers)]
    query = torch.randn(sizes.batch, sizes.heads, sizes.head_dim, device=device, dtype=dtype)
    one, other = (_metadata(sizes, first, device) for first in (0, sizes.batch))

    def step(metadata: AttentionMetadata) -> None:
        _run_layers(backend, caches, query, metadata, sizes)

    turns = itertools.cycle((one, other))
    kept_s = setup.time(lambda: step(one), calls=STEPS)
    new_s = setup.time(lambda: step(next(turns)), calls=STEPS)  # two batches in turn: no plan fits twice in a row
    size_bytes = 2 * sizes.layers * sizes.batch * sizes.rows * sizes.heads * sizes.head_dim * dtype.itemsize
    least_s, case = setup.limits.least_s(size_bytes), f"{sizes.batch} clips, {sizes.layers} layers"
    beside = f"{size_bytes / 1e9:.2f} GB to read"
    return [
        duration("cross_plan", f"{case}, plan kept", kept_s, least_s, f"{beside}; {ratio(kept_s, new_s)} a new plan's"),
        duration("cross_plan", f"{case}, plan made anew", new_s, least_s, beside),
    ]


def _run_layers(
    backend: AttentionBackend,
    caches: Sequence[torch.Tensor],
    query: torch.Tensor,
    metadata: AttentionMetadata,
    sizes: Sizes,
) -> None:
    plan = backend.plan(metadata, sizes.block_size, query.dtype)
    for cache in caches:
        backend.run(query, cache, plan)


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
