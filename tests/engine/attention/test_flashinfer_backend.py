"""Attention by FlashInfer equals dense masked attention, on random shapes; what is planned when, and what goes to
PyTorch instead. The kernels are a fake's (tests/fake_flashinfer): what is checked is all that stands around them."""

from __future__ import annotations

import sys
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from torch import Tensor

from common.errors import TriptychError
from engine.attention.backend import AttentionBackend, PagedAttentionContext, PlanSizes
from engine.attention.flashinfer.paged_batch import RaggedBatch
from engine.attention.flashinfer.served import ReasonLog, needs_tensor_cores, unserved
from engine.attention.flashinfer.wrappers import WORKSPACE_BYTES, fixed_decode_bytes
from engine.attention.metadata import AttentionMetadata, cross_plans_reused
from engine.attention.select import choose_backend
from engine.attention.torch_backend import TorchBackend
from engine.runner.graphs import padded
from engine.state.spec import HeadSpec
from tests.engine.attention.paged import BIASES, Paged, Shape, assert_equal, dense, shapes
from tests.fake_flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from tests.fake_flashinfer.dense import Wrapper
from tests.fake_flashinfer.installed import CPU, flashinfer_on_cpu, make_backend, make_ragged, no_compiler

BACKEND = make_backend()
"""One for all examples: plans of other batches lie behind each of them."""
HALVES = st.sampled_from([torch.bfloat16, torch.float16])
SEEDS = st.integers(0, 2**32 - 1)
SCALES = st.sampled_from([None, 0.3])
WINDOWS = st.sampled_from([None, 1, 3, 17, 1000])
CAUSAL = shapes(causal=True, head_dims=(64, 128), max_group=8, max_queries=9)
CROSS = shapes(causal=False, head_dims=(64, 128), max_group=8, max_queries=9)


@settings(max_examples=25)
@given(CAUSAL, HALVES, SEEDS, SCALES, WINDOWS)
def test_self_attention_equals_dense(
    shape: Shape, dtype: torch.dtype, seed: int, scale: float | None, window: int | None
) -> None:
    paged = Paged(shape, dtype, seed)
    expected = dense(paged.query, paged.key, paged.value, paged.mask(paged.allowed(window)), scale)
    assert_equal(paged.attend(BACKEND, scale=scale, window=window), expected, dtype)


@settings(max_examples=25)
@given(CROSS, HALVES, SEEDS, SCALES)
def test_cross_attention_equals_dense_and_is_zero_without_keys(
    shape: Shape, dtype: torch.dtype, seed: int, scale: float | None
) -> None:
    paged = Paged(shape, dtype, seed)
    expected = dense(paged.query, paged.key, paged.value, paged.mask(paged.allowed()), scale)
    got = paged.attend(BACKEND, scale=scale)
    assert_equal(got, expected, dtype)
    blind = [keys == 0 for queries, keys in shape.lens for _ in range(queries)]
    assert not got[torch.tensor(blind)].any()


@settings(max_examples=20)
@given(CROSS, SEEDS, st.booleans())
def test_ranges_of_keys_equal_dense_whoever_computes_them(shape: Shape, seed: int, common: bool) -> None:
    """Tokens of one request that see the same first keys stay with FlashInfer (`common`)."""
    paged = Paged(shape, torch.bfloat16, seed)
    random = np.random.default_rng(seed)
    pieces = [np.sort(random.integers(0, keys + 1, (queries, 2)), axis=1) for queries, keys in shape.lens]
    if common:
        pieces = [np.tile([0, random.integers(0, keys + 1)], (queries, 1)) for queries, keys in shape.lens]
    key_ranges = np.concatenate(pieces)
    plans = Wrapper.num_plans
    got = paged.attend(make_backend(), key_ranges=key_ranges)  # one that keeps no plan of another batch
    expected = dense(paged.query, paged.key, paged.value, paged.mask(paged.allowed(key_ranges=key_ranges)))
    assert_equal(got, expected, torch.bfloat16)
    if common:
        assert Wrapper.num_plans > plans


@settings(max_examples=25)
@given(CAUSAL, SEEDS, WINDOWS)
def test_keys_behind_tokens_of_whole_inputs_are_seen_by_a_mask(shape: Shape, seed: int, window: int | None) -> None:
    paged = Paged(shape, torch.bfloat16, seed)
    ahead, plans = paged.ranges_ahead(seed), Wrapper.num_plans
    expected = dense(paged.query, paged.key, paged.value, paged.mask(paged.allowed(window, ahead)))
    assert_equal(paged.attend(BACKEND, window=window, key_ranges=ahead), expected, torch.bfloat16)
    assert Wrapper.num_plans > plans, "none of it is PyTorch's"


@settings(max_examples=12)
@given(shapes(head_dims=(8, 72), max_queries=9), SEEDS, st.sampled_from(sorted(BIASES)))
def test_what_is_not_served_is_computed_by_pytorch(shape: Shape, seed: int, kind: str) -> None:
    paged, bias = Paged(shape, torch.bfloat16, seed), BIASES[kind](shape.num_heads)
    plans = Wrapper.num_plans
    got = paged.attend(make_backend(shape.head_dim), bias=bias)
    assert_equal(
        got, dense(paged.query, paged.key, paged.value, paged.mask(paged.allowed(), bias)), torch.bfloat16, biased=True
    )
    assert Wrapper.num_plans == plans


@settings(max_examples=25)
@given(st.one_of(CAUSAL, CROSS), SEEDS, WINDOWS, st.sampled_from(["by position", "by request", "mask"]))
def test_masks_are_flashinfers_and_addends_go_to_pytorch_said_once(
    shape: Shape, seed: int, window: int | None, kind: str
) -> None:
    paged, backend, bias = Paged(shape, torch.bfloat16, seed), make_backend(), BIASES[kind](shape.num_heads)
    window = window if shape.causal else None
    expected = dense(paged.query, paged.key, paged.value, paged.mask(paged.allowed(window), bias))
    plans = Wrapper.num_plans
    with capture_logs() as logs:
        for _ in range(2):
            assert_equal(paged.attend(backend, bias=bias, window=window), expected, torch.bfloat16, biased=True)
    assert (Wrapper.num_plans > plans) == (kind == "mask")
    assert len([line for line in logs if "not with a bias added" in line["reason"]]) == (kind != "mask")


def test_a_mask_in_cross_attention_follows_the_position_while_the_batch_stays() -> None:
    shape, backend = Shape([(1, 9), (1, 12)], 4, 2, 2, 64, causal=False), make_backend()
    paged, mask = written(shape, 0), BIASES["mask"](4)
    for step in range(3):
        paged.first = [step, step + 3]
        got = backend.run(paged.query, paged.cache, backend.plan(paged.metadata(), 4, torch.bfloat16), bias=mask)
        expected = dense(paged.query, paged.key, paged.value, paged.mask(paged.allowed(), mask))
        assert_equal(got, expected, torch.bfloat16, biased=True)


def test_where_masks_cannot_be_packed_pytorch_computes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    paged, backend = Paged(Shape([(1, 9), (5, 7)], 4, 2, 2, 64, causal=True), torch.bfloat16, 0), make_backend()
    monkeypatch.setattr("tests.fake_flashinfer.prefill.masks_of", no_compiler)
    mask = BIASES["mask"](4)
    with capture_logs() as logs:
        got = paged.attend(backend, bias=mask)
    expected = dense(paged.query, paged.key, paged.value, paged.mask(paged.allowed(), mask))
    assert_equal(got, expected, torch.bfloat16, biased=True)
    assert ["Could not find nvcc" in line["reason"] for line in logs] == [True]


@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(2, 64), (2, 8), (128, 128)])
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_keys_and_values_are_written_into_their_slots(
    num_kv_heads: int, head_dim: int, slot_dtype: torch.dtype
) -> None:
    """By FlashInfer or not: it has no kernel for heads of 8, and none for 128 heads of 128 that CUDA would launch."""
    shape = (2, 6, 4, num_kv_heads, head_dim)
    expected, got = torch.zeros(shape, dtype=torch.bfloat16), torch.zeros(shape, dtype=torch.bfloat16)
    backend, slots = make_backend(head_dim), torch.tensor([9, 22, 4, 5], dtype=slot_dtype)
    for count in (4, 2, 0, 4):
        pair = torch.randn(2, count, num_kv_heads, head_dim).to(torch.bfloat16)
        TorchBackend().write(expected, *pair, slots[:count])
        backend.write(got, *pair, slots[:count])
    assert torch.equal(got, expected)
    assert expected.any()


SERVED = HeadSpec(num_heads=14, num_kv_heads=2, head_dim=64)


def test_groups_of_seven_heads_are_served_on_tensor_cores() -> None:
    assert unserved(SERVED, torch.bfloat16) is None
    assert needs_tensor_cores(14, 2)
    assert not needs_tensor_cores(8, 2)


@pytest.mark.parametrize(
    ("heads", "dtype", "has_ranges", "reason"),
    [
        (SERVED, torch.float32, False, "bfloat16 and float16, not float32"),
        (replace(SERVED, head_dim=80), torch.bfloat16, False, "heads of 64, 128 and 256 elements, not of 80"),
        (replace(SERVED, head_dim=192), torch.bfloat16, False, "elements, not of 192"),
        (replace(SERVED, num_heads=13), torch.bfloat16, False, "not 13 query heads over 2 key heads"),
        (
            replace(SERVED, num_kv_heads=1, num_heads=32),
            torch.bfloat16,
            False,
            "16 query heads for each key head, not 32",
        ),
        (replace(SERVED, biased=True), torch.bfloat16, False, "not with a bias added"),
        (SERVED, torch.float16, True, "a causal mask and a window, not other ranges"),
    ],
)
def test_what_is_not_served_has_a_reason(heads: HeadSpec, dtype: torch.dtype, has_ranges: bool, reason: str) -> None:
    assert reason in (unserved(heads, dtype, has_ranges=has_ranges) or "")


def test_the_log_tells_once_what_is_not_served_and_what_computes_it() -> None:
    reasons, why = ReasonLog(), "FlashInfer serves heads of 64, 128 and 256 elements, not of 80"
    with capture_logs() as logs:
        for _ in range(2):
            reasons.warn(unserved(replace(SERVED, head_dim=80), torch.bfloat16) or "")
    line = {"event": "attention by PyTorch instead of FlashInfer", "reason": why, "log_level": "warning"}
    assert [told.items() >= line.items() for told in logs] == [True]


def plans_of(run: object) -> int:
    """How many plans FlashInfer makes while `run` is called."""
    before = Wrapper.num_plans
    run()  # type: ignore[operator]
    return Wrapper.num_plans - before


def test_layers_share_the_plans_of_a_step() -> None:
    paged = Paged(Shape([(1, 9), (1, 4), (5, 7)], 4, 2, 2, 64, causal=True), torch.bfloat16, 0)
    backend, new = make_backend(), (paged.key[paged.is_new], paged.value[paged.is_new])

    def step(windows: list[int | None]) -> None:
        context = PagedAttentionContext.of_step(backend, [paged.cache] * len(windows), paged.metadata())
        for layer, window in enumerate(windows):
            context.self_attention(layer, paged.query, *new, window=window)

    assert plans_of(lambda: step([None, None, None])) == 2  # one for the decodes, one for the prefill
    assert plans_of(lambda: step([None, 3, None, 3])) == 4  # windows are planned for themselves


def test_the_plan_of_cross_attention_is_kept_while_the_batch_is() -> None:
    paged = Paged(Shape([(1, 9), (1, 0), (3, 7)], 4, 2, 2, 64, causal=False), torch.bfloat16, 0)
    backend = make_backend()

    def step(metadata: AttentionMetadata) -> Tensor:
        plan = backend.plan(metadata, 4, torch.bfloat16)
        return torch.stack([backend.run(paged.query, paged.cache, plan) for _ in range(2)])

    first = step(paged.metadata())
    reused = cross_plans_reused.value
    assert plans_of(lambda: step(paged.metadata())) == 0
    assert cross_plans_reused.value == reused + 2
    assert torch.equal(step(paged.metadata()), first)
    fewer = replace(paged.metadata(), seq_lens=[8, 0, 7])
    assert plans_of(lambda: step(fewer)) == 1  # the prefill is still the same
    moved = replace(fewer, block_table=fewer.block_table.flip(0))
    assert plans_of(lambda: step(moved)) == 2
    rewritten = replace(fewer, host_table=fewer.table.copy())
    assert plans_of(lambda: step(rewritten)) == 2
    rewritten.table[:] = moved.table  # the memory of a step has the next batch
    assert plans_of(lambda: step(rewritten)) == 2
    ranges = np.array([(0, 8), (0, 0), *[(0, 7)] * 3])
    assert plans_of(lambda: step(replace(rewritten, key_ranges=ranges))) == 2
    ranges[0, 1] = 5
    assert plans_of(lambda: step(replace(rewritten, key_ranges=ranges))) == 1


def written(shape: Shape, seed: int) -> Paged:
    """A batch whose keys are all in the cache."""
    paged = Paged(shape, torch.bfloat16, seed)
    BACKEND.write(paged.cache, paged.key, paged.value, paged.slots)
    return paged


def fixed_backends() -> list[AttentionBackend]:
    return [make_backend(), TorchBackend()]


@pytest.mark.parametrize("backend", fixed_backends(), ids=lambda backend: backend.name)
@settings(max_examples=12)
@given(st.data(), st.booleans(), st.sampled_from([1, 4, 7]), WINDOWS)
def test_plans_at_fixed_addresses_follow_the_batch(
    backend: AttentionBackend, data: st.DataObject, causal: bool, group: int, window: int | None
) -> None:
    """One plan, batch after batch; requests without keys stand for padding and for texts without an input."""
    size = 4
    heads = HeadSpec(num_heads=2 * group, num_kv_heads=2, head_dim=64)
    plan = backend.make_fixed_plan(PlanSizes(size, 16, 4, torch.bfloat16, heads, causal=causal))
    assert plan is not None
    for seed in range(3):
        keys = data.draw(st.lists(st.integers(1 if causal else 0, 60), min_size=size, max_size=size))
        paged = written(Shape([(1, count) for count in keys], 4, 2, group, 64, causal), seed)
        assert plan.update(paged.metadata())
        got = backend.run(paged.query, paged.cache, plan, window=window)
        mask = paged.mask(paged.allowed(window if causal else None))
        assert_equal(got, dense(paged.query, paged.key, paged.value, mask), torch.bfloat16)


@settings(max_examples=25)
@given(st.data(), st.booleans(), WINDOWS)
def test_plans_of_prompts_follow_the_batch(data: st.DataObject, causal: bool, window: int | None) -> None:
    """Up to four requests of any lengths in a plan for 40 tokens: one more has the padding, if there is any."""
    backend, size, most = make_backend(), 40, 5
    plan = backend.make_fixed_plan(PlanSizes(size, 16, 4, torch.bfloat16, HeadSpec(4, 2, 64), causal, most))
    assert plan is not None
    for seed in range(3):
        counts = data.draw(st.lists(st.integers(1, 10), min_size=1, max_size=most - 1))
        keys = [count * causal + data.draw(st.integers(0, 50)) for count in counts]
        paged = written(Shape([*zip(counts, keys, strict=True)], 4, 2, 2, 64, causal), seed)
        assert plan.update(padded(paged.metadata(), size, most))
        query = torch.zeros(size, *paged.query.shape[1:], dtype=torch.bfloat16)
        query[: sum(counts)] = paged.query
        got = backend.run(query, paged.cache, plan, window=window)
        assert got.isfinite().all()
        mask = paged.mask(paged.allowed(window if causal else None))
        assert_equal(got[: sum(counts)], dense(paged.query, paged.key, paged.value, mask), torch.bfloat16)


def test_a_plan_of_prompts_refuses_tokens_that_see_later_ones() -> None:
    plan = make_backend().make_fixed_plan(PlanSizes(8, 8, 4, torch.bfloat16, HeadSpec(2, 2, 64), True, 3))
    assert plan is not None
    paged = Paged(Shape([(5, 9)], 4, 2, 1, 64, causal=True), torch.bfloat16, 0)
    ranges = np.array([[0, 9]] * 5, np.int64)
    assert plan.update(padded(paged.metadata(), 8, 3))
    assert not plan.update(padded(paged.metadata(ranges), 8, 3))


def test_a_plan_of_prompts_refuses_a_request_that_is_too_long_to_be_read_in_one_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.attention.flashinfer.fixed.MAX_KEYS", 40)
    backend, sizes = make_backend(), PlanSizes(8, 99, 4, torch.bfloat16, HeadSpec(2, 2, 64), True, 3)
    plan, decodes = (backend.make_fixed_plan(replace(sizes, max_requests=most)) for most in (3, None))
    assert plan is not None
    assert decodes is not None
    for keys in (40, 41):
        paged = Paged(Shape([(1, keys)], 4, 2, 1, 64, causal=True), torch.bfloat16, 0)
        assert plan.update(padded(paged.metadata(), 8, 3)) == (keys == 40)
        assert decodes.update(padded(paged.metadata(), 8))


@pytest.mark.parametrize("backend", fixed_backends(), ids=lambda backend: backend.name)
def test_a_plan_at_fixed_addresses_reads_ranges_that_begin_with_the_first_key(backend: AttentionBackend) -> None:
    paged = written(Shape([(1, 30), (1, 9), (1, 12)], 4, 2, 2, 64, causal=False), 0)
    plan = backend.make_fixed_plan(PlanSizes(3, 8, 4, torch.bfloat16, HeadSpec(4, 2, 64), causal=False))
    assert plan is not None
    for bounds in ([[0, 21], [0, 9], [5, 5]], [[0, 4], [0, 0], [0, 12]]):
        ranges = np.array(bounds, np.int64)
        assert plan.update(paged.metadata(ranges))
        got = backend.run(paged.query, paged.cache, plan)
        mask = paged.mask(paged.allowed(key_ranges=ranges))
        assert_equal(got, dense(paged.query, paged.key, paged.value, mask), torch.bfloat16)
    assert not plan.update(paged.metadata(np.array([[0, 21], [1, 9], [0, 12]], np.int64)))


@pytest.mark.parametrize("backend", fixed_backends(), ids=lambda backend: backend.name)
def test_a_plan_at_fixed_addresses_refuses_what_does_not_fit(backend: AttentionBackend) -> None:
    plan = backend.make_fixed_plan(PlanSizes(2, 3, 4, torch.bfloat16, HeadSpec(2, 2, 64), causal=True))
    assert plan is not None
    for lens in ([(1, 5)], [(1, 5), (2, 5)], [(1, 5), (1, 13)]):
        assert not plan.update(Paged(Shape(lens, 4, 2, 1, 64, causal=True), torch.bfloat16, 0).metadata())


def test_a_plan_at_fixed_addresses_is_kept_for_the_same_cross_batch() -> None:
    backend, paged = make_backend(), written(Shape([(1, 9), (1, 0)], 4, 2, 1, 64, causal=False), 0)
    plan = backend.make_fixed_plan(PlanSizes(2, 3, 4, torch.bfloat16, HeadSpec(2, 2, 64), causal=False))
    assert plan is not None
    with pytest.raises(RuntimeError, match="only after an update"):
        backend.run(paged.query, paged.cache, plan)
    assert plan.update(paged.metadata())
    backend.run(paged.query, paged.cache, plan)
    reused = cross_plans_reused.value
    assert plans_of(lambda: plan.update(paged.metadata())) == 0
    assert cross_plans_reused.value == reused + 1
    fewer = replace(paged.metadata(), seq_lens=[8, 0], host_table=paged.metadata().table.copy())
    assert plans_of(lambda: plan.update(fewer)) == 1
    fewer.table[:] = fewer.table[:, ::-1].copy()  # the memory of a step has the next batch
    assert plans_of(lambda: plan.update(fewer)) == 1


def test_heads_that_are_not_served_have_pytorchs_plan_at_fixed_addresses() -> None:
    backend = make_backend(head_dim=8)
    plan = backend.make_fixed_plan(PlanSizes(2, 4, 4, torch.bfloat16, HeadSpec(4, 2, 8), causal=True))
    assert plan is not None
    paged = Paged(Shape([(1, 9), (1, 4)], 4, 2, 2, 8, causal=True), torch.bfloat16, 0)
    backend.write(paged.cache, paged.key, paged.value, paged.slots)
    assert plan.update(paged.metadata())
    expected = dense(paged.query, paged.key, paged.value, paged.mask(paged.allowed()))
    assert_equal(backend.run(paged.query, paged.cache, plan), expected, torch.bfloat16)


@pytest.mark.parametrize(("size", "in_one_piece"), [(2, False), (64, True), (128, True)])
def test_a_graph_of_more_requests_than_the_workspace_has_room_for_divides_none(size: int, in_one_piece: bool) -> None:
    backend, heads = make_backend(), HeadSpec(num_heads=16, num_kv_heads=2, head_dim=64)
    plan = backend.make_fixed_plan(PlanSizes(size, 8, 16, torch.bfloat16, heads, causal=True))
    paged = written(Shape([(1, 20 + number % 30) for number in range(size)], 16, 2, 8, 64, causal=True), 0)
    assert plan is not None
    assert plan.update(paged.metadata())
    make_plan = BatchDecodeWithPagedKVCacheWrapper.plan
    with mock.patch.object(BatchDecodeWithPagedKVCacheWrapper, "plan", autospec=True, side_effect=make_plan) as planned:
        got = backend.run(paged.query, paged.cache, plan)
    assert [call.kwargs["disable_split_kv"] for call in planned.call_args_list] == [in_one_piece]
    assert_equal(got, dense(paged.query, paged.key, paged.value, paged.mask(paged.allowed())), torch.bfloat16)


def test_the_workspace_of_a_gpu_has_room_for_graphs_of_common_sizes() -> None:
    large = HeadSpec(num_heads=64, num_kv_heads=8, head_dim=128)
    assert fixed_decode_bytes(256, large, CPU) < WORKSPACE_BYTES < fixed_decode_bytes(512, large, CPU)
    on_vector_units = replace(large, num_kv_heads=32)
    assert fixed_decode_bytes(512, on_vector_units, CPU) == 0


def test_pytorch_has_no_plan_at_fixed_addresses_for_very_long_tables() -> None:
    assert TorchBackend().make_fixed_plan(PlanSizes(256, 8192, 16, torch.float32, SERVED, causal=True)) is None


@pytest.mark.parametrize(
    "place",
    [
        "append_paged_kv_cache",
        "BatchDecodeWithPagedKVCacheWrapper.plan",
        "BatchPrefillWithPagedKVCacheWrapper.run",
    ],
)
def test_where_kernels_do_not_run_the_start_gets_pytorch_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    monkeypatch.setattr(f"tests.fake_flashinfer.{place}", no_compiler)
    with flashinfer_on_cpu():
        backend = choose_backend(CPU, torch.float16)
        assert (backend.name, backend.is_fallback) == ("torch", True)
        said = capsys.readouterr()
        assert "Could not find nvcc" in said.out + said.err
        assert "install nvcc and ninja" in said.out + said.err
        with pytest.raises(TriptychError, match=r"'flashinfer': FlashInfer's kernels do not run here .* find nvcc"):
            choose_backend(CPU, torch.float16, "flashinfer")


@pytest.mark.parametrize(("windows", "plans"), [((None,), 2), ((17,), 2), ((None, 17), 4)])
def test_every_kernel_that_a_decoder_needs_is_tried_at_start(windows: tuple[int | None, ...], plans: int) -> None:
    with flashinfer_on_cpu():
        made = plans_of(lambda: choose_backend(CPU, torch.float16, heads=replace(SERVED, windows=windows)))
    assert made == plans  # decodes and prefills


@pytest.mark.parametrize(
    ("heads", "gathers"),
    [
        (SERVED, False),
        (replace(SERVED, head_dim=80), True),
        (replace(SERVED, biased=True), True),
        (HeadSpec(num_heads=32, num_kv_heads=1, head_dim=64), True),
    ],
)
def test_memory_is_kept_for_what_pytorch_gathers_of_heads_that_are_not_served(heads: HeadSpec, gathers: bool) -> None:
    with flashinfer_on_cpu():
        backend = choose_backend(CPU, torch.float16, "flashinfer", heads)
    assert (backend.gathered_share > 0) == gathers


def test_two_kinds_of_sequences_are_planned_once_each_however_layers_take_turns() -> None:
    ragged = make_ragged()
    query, key, value = (torch.randn(12, 2, 64).to(torch.bfloat16) for _ in range(3))
    windows, whole, other = (RaggedBatch(lengths, CPU) for lengths in ([4, 4, 4], [12], [5, 7]))

    def layers(*kinds: RaggedBatch) -> None:
        for kind in kinds:
            ragged.run(query, key, value, kind)

    assert plans_of(lambda: layers(windows, whole, windows, windows, whole, windows, whole)) == 2
    assert plans_of(lambda: layers(other, whole, other, windows)) == 2  # a third kind takes the place of the oldest


def test_without_flashinfer_cuda_gets_pytorch_and_the_log_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    cuda = torch.device("cuda")
    assert choose_backend(cuda, torch.bfloat16).name == "torch"
    said = capsys.readouterr()
    assert "pip install '.[cuda]'" in said.out + said.err
    with pytest.raises(TriptychError, match=r"pip install '\.\[cuda\]'"):
        choose_backend(cuda, torch.bfloat16, "flashinfer")
    assert choose_backend(cuda, torch.float32).name == "torch"
