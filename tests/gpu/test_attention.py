"""Every shape of attention that the models have, on the GPU, against dense attention in float64; inputs are new each
time, and SEED makes the same ones again."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from engine.attention.backend import PlanSizes
from engine.attention.flashinfer.paged_batch import RaggedBatch
from engine.attention.flashinfer.ragged import FlashInferRagged
from engine.attention.flashinfer.wrappers import RAGGED_WORKSPACE_BYTES, Workspace, load_flashinfer
from engine.attention.metadata import AttentionMetadata
from engine.attention.select import choose_backend
from engine.device.choice import DTYPES
from engine.device.recorder import CudaRecorder
from engine.runner.graphs import padded
from engine.state.spec import HeadSpec
from tests.engine.attention.paged import Paged, Shape, SomeSeen, assert_equal, dense
from tests.gpu.device import DEVICE, needs_gpu
from tests.gpu.fast_path import flashinfer_here
from tests.plain_recorder import PlainRecorder
from tools.gpu_check.cases import CASES, AttentionCase

pytestmark = needs_gpu
SEED = int(os.environ.get("SEED") or secrets.randbits(31))
BATCHES = {
    "decodes": [(1, keys) for keys in (1, 15, 16, 17, 300, 1500)],
    "prefill": [(257, 257)],
    "chunk": [(64, 900)],
    "mixed": [(1, 40), (1, 700), (2, 2), (33, 50), (120, 400)],
}
BLOCK_SIZE = 16
SERVED = [case for case in CASES if case.head_dim != 80 and case.dtype != "float32"]
MASKED = [case for case in SERVED if case.window is None]


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    """To rehearse on a CPU, FlashInfer's are a fake's."""
    with flashinfer_here():
        yield


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


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("causal", [True, False], ids=["self", "cross"])
def test_attention_equals_dense(batch: str, case: AttentionCase, causal: bool) -> None:
    dtype, window, heads = DTYPES[case.dtype], case.window, heads_of(case)
    if window is not None and not causal:
        pytest.skip("cross-attention has no window")
    backend = choose_backend(torch.device(DEVICE), dtype, name_for(case), heads)
    for scale in (None, 0.1):
        paged = OnDevice(shape_of(BATCHES[batch], case, causal), dtype)
        got = paged.attend(backend, window=window, scale=scale)
        assert_equal(got, paged.expected(window, scale), dtype)


@pytest.mark.parametrize("case", MASKED, ids=str)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", ["self", "cross", "whole inputs"])
def test_masks_are_flashinfers(batch: str, case: AttentionCase, kind: str) -> None:
    """A mask of the model's, and tokens of an input that see each other in both directions."""
    dtype, mask = DTYPES[case.dtype], None if kind == "whole inputs" else SomeSeen()
    backend = choose_backend(torch.device(DEVICE), dtype, "flashinfer", heads_of(case))
    paged = OnDevice(shape_of(BATCHES[batch], case, kind != "cross"), dtype)
    ahead = paged.ranges_ahead(SEED) if kind == "whole inputs" else None
    with capture_logs() as logs:
        got = paged.attend(backend, bias=mask, key_ranges=ahead)
    seen = paged.mask(paged.allowed(None, ahead), mask).to(DEVICE)
    assert_equal(got, dense(paged.query, paged.key, paged.value, seen), dtype, biased=True)
    assert logs == [], "PyTorch has computed it"


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["self", "cross"])
def test_a_recorded_plan_at_fixed_addresses_follows_the_batch(case: AttentionCase, causal: bool) -> None:
    dtype, window, heads = DTYPES[case.dtype], case.window if causal else None, heads_of(case)
    backend = choose_backend(torch.device(DEVICE), dtype, name_for(case), heads)
    plan = backend.make_fixed_plan(PlanSizes(4, 128, BLOCK_SIZE, dtype, heads, causal=causal))
    assert plan is not None, f"{backend.name} has no such plan"
    shapes = [shape_of([(1, count) for count in keys], case, causal) for keys in ((1, 16, 17, 300), (2000, 5, 1, 31))]
    batches = [OnDevice(shape, dtype) for shape in shapes]
    query, cache = torch.zeros_like(batches[0].query), torch.zeros_like(batches[0].cache)
    assert plan.update(batches[0].metadata())
    recorder = CudaRecorder(torch.device(DEVICE)) if DEVICE == "cuda" else PlainRecorder()
    replay = recorder.record(lambda: backend.run(query, cache, plan, window=window))
    for paged in (*batches, batches[0]):
        backend.write(paged.cache, paged.key, paged.value, paged.slots)
        query.copy_(paged.query)
        cache.copy_(paged.cache)
        assert plan.update(paged.metadata())
        assert_equal(replay(), paged.expected(window), dtype)


@pytest.mark.parametrize("case", SERVED, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["self", "cross"])
def test_a_recorded_plan_of_prompts_follows_the_batch(case: AttentionCase, causal: bool) -> None:
    """Behind the tokens of a step stand those of padding, a request of their own, and requests without any."""
    dtype, window, size, requests = DTYPES[case.dtype], case.window if causal else None, 512, 9
    backend = choose_backend(torch.device(DEVICE), dtype, "flashinfer", heads_of(case))
    plan = backend.make_fixed_plan(PlanSizes(size, 128, BLOCK_SIZE, dtype, heads_of(case), causal, requests))
    assert plan is not None
    batches = [OnDevice(shape_of(BATCHES[name], case, causal), dtype) for name in BATCHES]
    query = torch.zeros(size, *batches[0].query.shape[1:], dtype=dtype, device=DEVICE)
    num_blocks, rest = max(paged.cache.shape[1] for paged in batches), batches[0].cache.shape[2:]
    cache = torch.zeros(2, num_blocks, *rest, dtype=dtype, device=DEVICE)
    assert plan.update(padded(batches[0].metadata(), size, requests))
    recorder = CudaRecorder(torch.device(DEVICE)) if DEVICE == "cuda" else PlainRecorder()
    replay = recorder.record(lambda: backend.run(query, cache, plan, window=window))
    for paged in (*batches, batches[0]):
        backend.write(paged.cache, paged.key, paged.value, paged.slots)
        count = len(paged.query)
        query[:count] = paged.query
        cache[:, : paged.cache.shape[1]] = paged.cache
        assert plan.update(padded(paged.metadata(), size, requests))
        out = replay()
        assert torch.isfinite(out).all()
        assert_equal(out[:count], paged.expected(window), dtype)


@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_encoder_attention_is_block_diagonal(head_dim: int) -> None:
    dtype, lengths = torch.bfloat16, [1, 64, 1500, 63]
    workspace = Workspace(load_flashinfer(), torch.device(DEVICE), RAGGED_WORKSPACE_BYTES)
    generator = torch.Generator(DEVICE).manual_seed(SEED)
    query, key, value = (
        torch.randn(sum(lengths), 4, head_dim, generator=generator, device=DEVICE, dtype=dtype) for _ in range(3)
    )
    allowed = torch.block_diag(*(torch.ones(count, count) for count in lengths)).bool().to(DEVICE)
    mask = torch.zeros(allowed.shape, dtype=torch.float64, device=DEVICE).masked_fill(~allowed, float("-inf"))[None]
    got = FlashInferRagged(workspace).run(query, key, value, RaggedBatch(lengths, torch.device(DEVICE)))
    assert_equal(got, dense(query, key, value, mask), dtype)


def name_for(case: AttentionCase) -> str:
    """By its name FlashInfer has to run; heads that it does not serve are PyTorch's within it."""
    return "auto" if case.dtype == "float32" else "flashinfer"


def heads_of(case: AttentionCase) -> HeadSpec:
    return HeadSpec(case.num_heads, case.num_kv_heads, case.head_dim, windows=(case.window,))


def shape_of(lens: list[tuple[int, int]], case: AttentionCase, causal: bool) -> Shape:
    group = case.num_heads // case.num_kv_heads
    return Shape(lens, BLOCK_SIZE, case.num_kv_heads, group, case.head_dim, causal)
