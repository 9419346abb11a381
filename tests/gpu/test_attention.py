"""Every shape of attention that the models have, on the GPU, against dense attention in float64; inputs are new each
time, and SEED makes the same ones again."""

from __future__ import annotations

import os
import secrets
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.attention.backend import HeadSpec
from engine.attention.metadata import AttentionMetadata
from engine.attention.select import choose_backend
from tests.engine.paged import Paged, Shape, assert_equal, dense
from tests.gpu.device import DEVICE, needs_gpu

pytestmark = needs_gpu
SEED = int(os.environ.get("SEED") or secrets.randbits(31))
DTYPES = (torch.bfloat16, torch.float16)
HEADS = ((3, 3, 64), (2, 6, 64), (2, 14, 64), (2, 16, 128), (4, 4, 128), (1, 8, 256), (2, 4, 80), (2, 4, 32))
"""Key heads, query heads and their size: Whisper's, SmolLM2's, Qwen2.5's (groups of 7 and 8), and what falls back."""
BATCHES = {
    "decodes": [(1, keys) for keys in (1, 15, 16, 17, 300, 1500)],
    "prefill": [(257, 257)],
    "chunk": [(64, 900)],
    "mixed": [(1, 40), (1, 700), (2, 2), (33, 50), (120, 400)],
}
BLOCK_SIZE = 16


class OnDevice(Paged):
    """The same batch in the memory of the device."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__(shape, dtype, SEED)
        for name in ("query", "key", "value", "slots", "is_new", "cache"):
            setattr(self, name, getattr(self, name).to(DEVICE))

    def metadata(self, key_ranges: np.ndarray | None = None) -> AttentionMetadata:
        plain = super().metadata(key_ranges)
        return replace(plain, block_table=plain.block_table.to(DEVICE), host_table=plain.block_table.numpy())

    def expected(self, window: int | None = None, scale: float | None = None) -> torch.Tensor:
        mask = self.mask(self.allowed(window)).to(DEVICE)
        return dense(self.query, self.key, self.value, mask, scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("causal", [True, False], ids=["self", "cross"])
def test_attention_equals_dense(batch: str, heads: tuple[int, int, int], causal: bool, dtype: torch.dtype) -> None:
    num_kv_heads, num_heads, head_dim = heads
    shape = Shape(BATCHES[batch], BLOCK_SIZE, num_kv_heads, num_heads // num_kv_heads, head_dim, causal)
    backend = choose_backend(torch.device(DEVICE), dtype, head_dim=head_dim)
    for window, scale in [(None, None), (None, 0.1), (17, None)] if causal else [(None, None)]:
        paged = OnDevice(shape, dtype)
        got = paged.attend(backend, window=window, scale=scale)
        assert_equal(got, paged.expected(window, scale), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["self", "cross"])
def test_a_plan_at_fixed_addresses_follows_the_batch(
    heads: tuple[int, int, int], causal: bool, dtype: torch.dtype
) -> None:
    num_kv_heads, num_heads, head_dim = heads
    backend = choose_backend(torch.device(DEVICE), dtype, head_dim=head_dim)
    spec = HeadSpec(num_heads, num_kv_heads, head_dim)
    plan = backend.make_decode_plan(4, 128, BLOCK_SIZE, dtype, spec, causal=causal)
    if plan is None:
        pytest.skip(f"{backend.name} has no such plan")
    for keys in ((1, 16, 17, 300), (2000, 5, 1, 31)):
        paged = OnDevice(
            Shape(
                [(1, count) for count in keys], BLOCK_SIZE, num_kv_heads, num_heads // num_kv_heads, head_dim, causal
            ),
            dtype,
        )
        backend.write(paged.cache, paged.key, paged.value, paged.slots)
        plan.update(paged.metadata())
        assert_equal(backend.run(paged.query, paged.cache, plan), paged.expected(), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_encoder_attention_is_block_diagonal(head_dim: int, dtype: torch.dtype) -> None:
    backend, lengths = choose_backend(torch.device(DEVICE), dtype, head_dim=head_dim), [1, 64, 1500, 63]
    generator = torch.Generator(DEVICE).manual_seed(SEED)
    query, key, value = (
        torch.randn(sum(lengths), 4, head_dim, generator=generator, device=DEVICE, dtype=dtype) for _ in range(3)
    )
    allowed = torch.block_diag(*(torch.ones(count, count) for count in lengths)).bool().to(DEVICE)
    mask = torch.zeros(allowed.shape, dtype=torch.float64, device=DEVICE).masked_fill(~allowed, float("-inf"))[None]
    got = backend.run_ragged(query, key, value, backend.plan_ragged(lengths))
    assert_equal(got, dense(query, key, value, mask), dtype)
