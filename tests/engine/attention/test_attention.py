"""Paged attention equals dense masked attention, on random shapes: the document's block-diagonal and causal rules, with
grouped heads, scales, biases and masks, sliding windows and key ranges."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.config import AttentionBackendName
from common.errors import TriptychError
from engine.attention import select
from engine.attention.backend import AttentionBackend, PagedAttentionContext, PlanSizes
from engine.attention.select import BACKENDS, choose_backend
from engine.attention.split_by_phase import PhasedBackend
from engine.attention.torch_backend import TorchBackend
from engine.native.build import KernelsUnavailableError
from engine.state.spec import HeadSpec
from tests.engine.attention.paged import BIASES, DistanceBias, Paged, Shape, assert_equal, dense, shapes

CPU = torch.device("cpu")


def backends() -> list[AttentionBackend]:
    return [TorchBackend(), PhasedBackend(TorchBackend(), TorchBackend()), choose_backend(CPU)]


DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
SEEDS = st.integers(0, 2**32 - 1)
SCALES = st.sampled_from([None, 1.0, 0.3])
WINDOWS = st.sampled_from([None, 1, 3, 17, 1000])
HEAD_DIMS = (8, 20, 32, 48, 64, 80, 96, 112, 128, 144, 256)
"""The kernels of a CPU take other ways with each of them, and with more than four heads of a group."""


@pytest.mark.parametrize("backend", backends(), ids=lambda backend: backend.name)
@settings(max_examples=60)
@given(shapes(head_dims=HEAD_DIMS, max_group=8), DTYPES, SEEDS, SCALES)
def test_paged_equals_dense(
    backend: AttentionBackend, shape: Shape, dtype: torch.dtype, seed: int, scale: float | None
) -> None:
    paged = Paged(shape, dtype, seed)
    expected = dense(paged.query, paged.key, paged.value, paged.mask(paged.allowed()), scale)
    spread = 1.0 if scale is None else scale * shape.head_dim**0.5
    assert_equal(paged.attend(backend, scale=scale), expected, dtype, spread=spread)


@pytest.mark.parametrize("backend", backends(), ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("lens", "masks"),
    [
        (
            [(3, 3), (2, 2), (5, 5)],
            [["011", "001", "000"], ["01", "00"], ["01111", "00111", "00011", "00001", "00000"]],
        ),
        ([(1, 4), (1, 3), (3, 8)], [["0000"], ["000"], ["00000011", "00000001", "00000000"]]),
        ([(1, 4), (1, 3), (1, 9)], [["0000"], ["000"], ["000000000"]]),
    ],
    ids=["step 1", "step 2", "decode"],
)
def test_the_steps_of_the_document_have_its_masks(
    backend: AttentionBackend, dtype: torch.dtype, lens: list[tuple[int, int]], masks: list[list[str]]
) -> None:
    """The document is "Prepare inputs for model forwarding"; 1 is a hidden key. Step 1 has its causal mask of 5 x 5 for
    prompts of 3, 2 and 5 tokens, step 2 its rows of 5 x 8 for two decodes and three tokens of a prompt."""
    paged = Paged(Shape(lens, block_size=2, num_kv_heads=1, group=2, head_dim=64, causal=True), dtype, seed=0)
    blocks = [torch.tensor([[key == "0" for key in row] for row in rows]) for rows in masks]
    expected = dense(paged.query, paged.key, paged.value, paged.mask(torch.block_diag(*blocks).bool()))
    assert_equal(paged.attend(backend), expected, dtype)


@pytest.mark.parametrize("backend", backends(), ids=lambda backend: backend.name)
@settings(max_examples=60)
@given(shapes(head_dims=HEAD_DIMS, max_group=8), DTYPES, SEEDS, WINDOWS, st.sampled_from(sorted(BIASES)))
def test_biases_masks_and_windows_equal_dense(
    backend: AttentionBackend, shape: Shape, dtype: torch.dtype, seed: int, window: int | None, kind: str
) -> None:
    paged, bias = Paged(shape, dtype, seed), BIASES[kind](shape.num_heads)
    window = window if shape.causal else None
    expected = dense(paged.query, paged.key, paged.value, paged.mask(paged.allowed(window), bias))
    assert_equal(paged.attend(backend, bias=bias, window=window), expected, dtype, biased=bias is not None)


@pytest.mark.parametrize("backend", [TorchBackend(), choose_backend(CPU)], ids=lambda backend: backend.name)
@pytest.mark.parametrize("left", [torch.nan, torch.inf])
@pytest.mark.parametrize("recorded", [False, True])
def test_what_another_request_left_behind_the_keys_does_not_show(
    backend: AttentionBackend, left: float, recorded: bool
) -> None:
    shape = Shape([(1, 3), (1, 9), (1, 16)], block_size=8, num_kv_heads=2, group=2, head_dim=32, causal=True)
    paged = Paged(shape, torch.float32, seed=0)
    paged.cache.fill_(left)
    expected = dense(paged.query, paged.key, paged.value, paged.mask(paged.allowed()))
    got = paged.attend(backend)
    if recorded:
        plan = backend.make_fixed_plan(PlanSizes(3, 2, 8, torch.float32, HeadSpec(4, 2, 32), causal=True))
        assert plan is not None
        assert plan.update(paged.metadata())
        got = backend.run(paged.query, paged.cache, plan)
    assert_equal(got, expected, torch.float32)


def test_a_recorded_step_refuses_a_bias_that_it_was_not_made_for() -> None:
    backend = choose_backend(CPU)
    if not backend.calls_kernels:
        pytest.skip("the processor or the compiler cannot run the kernels: no step is recorded")
    heads = HeadSpec(num_heads=2, num_kv_heads=2, head_dim=8)
    plan = backend.make_fixed_plan(PlanSizes(1, 1, 4, torch.bfloat16, heads, causal=True))
    assert plan is not None
    query, cache = torch.zeros(1, 2, 8).bfloat16(), torch.zeros(2, 1, 4, 2, 8).bfloat16()
    with pytest.raises(ValueError, match=r"names the kind in its spec"):
        backend.run(query, cache, plan, bias=DistanceBias(2))


@pytest.mark.parametrize("backend", backends(), ids=lambda backend: backend.name)
@settings(max_examples=60)
@given(shapes(causal=False), DTYPES, SEEDS)
def test_each_token_sees_its_own_range_of_keys(
    backend: AttentionBackend, shape: Shape, dtype: torch.dtype, seed: int
) -> None:
    paged = Paged(shape, dtype, seed)
    random = np.random.default_rng(seed)
    pieces = [np.sort(random.integers(0, keys + 1, (queries, 2)), axis=1) for queries, keys in shape.lens]
    key_ranges = np.concatenate(pieces)  # about one in `keys` of them is empty
    expected = dense(paged.query, paged.key, paged.value, paged.mask(paged.allowed(key_ranges=key_ranges)))
    got = paged.attend(backend, key_ranges=key_ranges)
    assert_equal(got, expected, dtype)
    assert not got[torch.from_numpy(key_ranges[:, 0] == key_ranges[:, 1])].any()


@pytest.mark.parametrize("backend", backends(), ids=lambda backend: backend.name)
@settings(max_examples=60)
@given(shapes(causal=True), DTYPES, SEEDS, WINDOWS)
def test_tokens_of_whole_inputs_see_keys_behind_themselves(
    backend: AttentionBackend, shape: Shape, dtype: torch.dtype, seed: int, window: int | None
) -> None:
    paged = Paged(shape, dtype, seed)
    ahead = paged.ranges_ahead(seed)
    expected = dense(paged.query, paged.key, paged.value, paged.mask(paged.allowed(window, ahead)))
    assert_equal(paged.attend(backend, window=window, key_ranges=ahead), expected, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [None, 0.1])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("num_keys", [300, 900, 1500, 2000])
def test_a_key_too_few_or_too_many_is_no_matter_of_rounding(
    num_keys: int, head_dim: int, scale: float | None, dtype: torch.dtype
) -> None:
    """Of the comparison itself: rounded answers pass, the first or last key left out or read twice does not."""
    for seed in range(5):
        paged = Paged(Shape([(1, num_keys)], 16, 2, 2, head_dim, causal=True), dtype, seed)

        def attended(keys: list[int], paged: Paged = paged) -> Tensor:
            mask = torch.zeros(1, 1, len(keys), dtype=torch.float64)
            return dense(paged.query, paged.key[keys], paged.value[keys], mask, scale)

        keys = list(range(num_keys))
        expected = attended(keys)
        assert_equal(expected.to(dtype), expected, dtype)
        assert_equal(with_rounded_weights(paged, scale), expected, dtype)
        for wrong in (keys[:-1], keys[1:], [*keys, keys[-1]], [keys[0], *keys]):
            with pytest.raises(AssertionError, match="times as far off as rounding"):
                assert_equal(attended(wrong).to(dtype), expected, dtype)


def with_rounded_weights(paged: Paged, scale: float | None) -> Tensor:
    """One query over all keys as kernels on tensor cores compute it: weights in half precision, their sum before."""
    group, dtype = paged.shape.group, paged.dtype
    key, value = (x.repeat_interleave(group, 1).transpose(0, 1).float() for x in (paged.key, paged.value))
    scores = paged.query.transpose(0, 1).float() @ key.transpose(1, 2) * (scale or paged.shape.head_dim**-0.5)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    attended = weights.to(dtype).float() @ value / weights.sum(-1, keepdim=True)
    return attended.transpose(0, 1).to(dtype)


def test_a_bias_is_evaluated_once_for_all_layers() -> None:
    calls: list[tuple[int, int]] = []

    class Counting(DistanceBias):
        def values(self, queries: Tensor, keys: Tensor, request: Any) -> Tensor:
            calls.append((len(queries), len(keys)))
            return super().values(queries, keys, request)

    shape = Shape([(1, 7), (4, 9)], 4, 2, 1, 8, causal=True)
    paged = Paged(shape, torch.float32, 0)
    context = PagedAttentionContext.of_step(TorchBackend(), [paged.cache] * 3, paged.metadata())
    new = paged.key[paged.is_new], paged.value[paged.is_new]
    counting = Counting(2)
    for layer in range(3):
        context.self_attention(layer, paged.query, *new, bias=counting)
    assert len(calls) == len(shape.lens)


def test_every_backend_can_be_named_in_the_settings() -> None:
    assert {"auto", *BACKENDS} == {*get_args(AttentionBackendName)}


def test_a_backend_that_cannot_serve_the_dtype_is_refused() -> None:
    with pytest.raises(TriptychError, match=r"'torch' does not serve torch\.float64 with heads of 64 on cpu"):
        choose_backend(CPU, torch.float64, "torch")


def test_a_named_backend_serves_both_phases() -> None:
    assert isinstance(choose_backend(CPU, torch.bfloat16, "torch"), TorchBackend)


@pytest.mark.parametrize("name", ["auto", "native"])
def test_prompts_that_the_kernel_would_compute_token_by_token_go_to_pytorch(name: str) -> None:
    if not choose_backend(CPU).calls_kernels:
        pytest.skip("the processor or the compiler cannot run the kernels")
    biased = HeadSpec(1, 1, 64, biased=True)
    for dtype, heads in ((torch.float32, HeadSpec(1, 1, 64)), (torch.bfloat16, biased)):
        assert choose_backend(CPU, dtype, name, heads).name == "torch+native"
    assert choose_backend(CPU, torch.bfloat16, name).name == "native"


def test_what_cannot_run_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> AttentionBackend:
        raise KernelsUnavailableError("no compiler")

    absent = select.BackendEntry(missing, frozenset({"cpu"}), frozenset({torch.bfloat16}))
    monkeypatch.setattr(select, "BACKENDS", {"absent": absent, "torch": BACKENDS["torch"]})
    chosen, plain = choose_backend(CPU, torch.bfloat16), choose_backend(CPU, torch.float32)
    assert isinstance(chosen, TorchBackend)
    assert isinstance(plain, TorchBackend)
    assert chosen.is_fallback, "what was preferred cannot run"
    assert not plain.is_fallback, "nothing was passed over"
    with pytest.raises(TriptychError, match="'absent': no compiler"):
        choose_backend(CPU, torch.bfloat16, "absent")


def test_heads_that_are_too_large_for_the_kernel_go_to_torch() -> None:
    assert isinstance(choose_backend(CPU, torch.bfloat16, heads=HeadSpec(1, 1, 320)), TorchBackend)
    with pytest.raises(TriptychError, match="heads of 320"):
        choose_backend(CPU, torch.bfloat16, "native", HeadSpec(1, 1, 320))
