"""Attention by a native CPU kernel, reading blocks in place without gathering."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from engine.attention.backend import AttentionBackend, FixedPlan, PlanSizes, dense_rows
from engine.attention.metadata import AttentionMetadata
from engine.native import ops
from engine.state.bias import AttentionBias
from engine.state.spec import IntArray


@dataclass(frozen=True)
class _NativePlan:
    """`tables` [num_requests, max_blocks]; `requests` [num_tokens], whose table is a token's; by window `key_ranges`
    [num_tokens, 2], the visible keys."""

    metadata: AttentionMetadata
    tables: torch.Tensor
    requests: torch.Tensor
    key_ranges: dict[int | None, torch.Tensor] = field(default_factory=dict)
    biases: dict[AttentionBias, torch.Tensor] = field(default_factory=dict)


class NativeFixedPlan(FixedPlan):
    """The arrays of `_NativePlan`, rewritten in place."""

    takes_prompts = True

    def __init__(self, sizes: PlanSizes) -> None:
        super().__init__(sizes)
        count, windows = sizes.num_tokens, (None, *sizes.heads.windows)
        self.tables = torch.from_numpy(np.zeros((count, sizes.max_blocks), np.int64))  # memory comes as rows are used
        self.requests = torch.zeros(count, dtype=torch.int64)
        self.key_ranges = {window: torch.zeros(count, 2, dtype=torch.int64) for window in windows}

    def _served_keys(self, metadata: AttentionMetadata) -> IntArray | None:
        sizes, ends = self.sizes, metadata.seq_lens if metadata.key_ranges is None else metadata.key_ranges[:, 1]
        fits = max(ends, default=0) <= sizes.max_blocks * sizes.block_size and metadata.causal == sizes.causal
        return np.asarray(metadata.seq_lens) if fits and metadata.query_start_loc[-1] == sizes.num_tokens else None

    def _update(self, metadata: AttentionMetadata, num_keys: IntArray) -> None:
        width = min(metadata.table.shape[1], self.sizes.max_blocks)
        self.tables.numpy()[: metadata.num_requests, :width] = metadata.table[:, :width]
        self.requests.numpy()[:] = _requests_of(metadata)
        for window, ranges in self.key_ranges.items():
            ranges.numpy()[:] = _key_ranges(metadata, window)


class NativeBackend(AttentionBackend):
    """Attend for every query token separately, and in bfloat16 for those of a prompt together. Raises
    KernelsUnavailableError if the kernels cannot run."""

    name = "native"
    calls_kernels = True

    def __init__(self) -> None:
        ops.enable()

    def plan(self, metadata: AttentionMetadata, block_size: int, dtype: torch.dtype) -> _NativePlan:
        return _NativePlan(metadata, metadata.block_table.contiguous(), torch.from_numpy(_requests_of(metadata)))

    def run(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        plan: _NativePlan | NativeFixedPlan,
        *,
        scale: float | None = None,
        bias: AttentionBias | None = None,
        window: int | None = None,
    ) -> torch.Tensor:
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        offsets = None
        if isinstance(plan, _NativePlan):
            if window not in plan.key_ranges:
                plan.key_ranges[window] = torch.from_numpy(_key_ranges(plan.metadata, window))
            offsets = None if bias is None else _evaluated(plan, bias, query.shape[1], plan.key_ranges[window])
        else:
            plan.refuse(bias)
            window = window if plan.sizes.causal else None
        ranges = plan.key_ranges[window]
        return ops.paged_attention(dense_rows(query), cache, plan.tables, plan.requests, ranges, scale, offsets)

    def make_fixed_plan(self, sizes: PlanSizes) -> FixedPlan | None:
        return None if sizes.heads.biased else NativeFixedPlan(sizes)

    def write(self, cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        ops.write_cache(cache, dense_rows(key), dense_rows(value), slot_mapping)


def _requests_of(metadata: AttentionMetadata) -> IntArray:
    return np.repeat(np.arange(metadata.num_requests), np.diff(metadata.query_start_loc))


def _key_ranges(metadata: AttentionMetadata, window: int | None) -> IntArray:
    window = window if metadata.causal else None
    if metadata.key_ranges is not None:
        return np.ascontiguousarray(metadata.ranges_within(window), np.int64)
    counts = np.diff(metadata.query_start_loc)
    ends = metadata.positions + 1 if metadata.causal else np.repeat(metadata.seq_lens, counts)
    begins = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
    return np.stack((begins, ends), axis=1)


def _evaluated(plan: _NativePlan, bias: AttentionBias, num_heads: int, key_ranges: torch.Tensor) -> torch.Tensor:
    """Return [num_heads, num_tokens, max_len] in float32."""
    values = plan.biases.get(bias)
    if values is None:
        keys = torch.arange(int(key_ranges[:, 1].max()))
        values = plan.metadata.evaluate(bias, keys, 0, plan.metadata.num_requests).float()
        values = plan.biases[bias] = values.expand(num_heads, -1, -1).contiguous()
    return values
