"""Decode attention by a native CPU kernel, reading blocks in place without gathering."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.attention.backend import AttentionBackend, DecodePlan
from engine.attention.metadata import AttentionMetadata
from engine.native import ops
from engine.state.bias import AttentionBias
from engine.state.spec import HeadSpec, IntArray


@dataclass(frozen=True)
class _NativePlan:
    """`key_ranges` [num_tokens, 2] are the visible keys without a window; `windowed` the same for each window."""

    metadata: AttentionMetadata
    tables: torch.Tensor
    key_ranges: torch.Tensor
    windowed: dict[int, torch.Tensor] = field(default_factory=dict)
    biases: dict[AttentionBias, torch.Tensor] = field(default_factory=dict)


class NativeDecodePlan(DecodePlan):
    """`tables` [num_requests, max_blocks], and by window `key_ranges` [num_requests, 2], rewritten in place."""

    def __init__(
        self, num_requests: int, max_blocks: int, block_size: int, windows: Iterable[int | None], *, causal: bool
    ) -> None:
        super().__init__(num_requests, max_blocks, block_size, causal=causal)
        self.tables = torch.zeros(num_requests, max_blocks, dtype=torch.int64)
        self.key_ranges = {window: torch.zeros(num_requests, 2, dtype=torch.int64) for window in (None, *windows)}

    def _update(self, metadata: AttentionMetadata, num_keys: IntArray) -> None:
        width = min(metadata.table.shape[1], self.max_blocks)
        self.tables.numpy()[:, :width] = metadata.table[:, :width]
        for window, ranges in self.key_ranges.items():
            begins, ends = ranges.numpy().T
            ends[:] = num_keys
            np.maximum(num_keys - (window or num_keys), 0, out=begins)


class NativeBackend(AttentionBackend):
    """Attend for every query token separately, efficient for few queries per request. Raises KernelsUnavailableError if
    the kernels cannot run."""

    name = "native"
    calls_kernels = True

    def __init__(self) -> None:
        ops.enable()

    def plan(self, metadata: AttentionMetadata, block_size: int, dtype: torch.dtype) -> _NativePlan:
        counts = np.diff(metadata.query_start_loc)
        tables = metadata.block_table
        if len(counts) < metadata.query_start_loc[-1]:
            tables = tables.repeat_interleave(torch.from_numpy(counts), dim=0)
        if metadata.key_ranges is not None:
            ranges = np.ascontiguousarray(metadata.key_ranges, np.int64)
        else:
            ends = np.repeat(np.asarray(metadata.seq_lens, np.int64), counts)
            if metadata.causal:
                request_ends = np.repeat(np.asarray(metadata.query_start_loc[1:], np.int64), counts)
                ends -= request_ends - 1 - np.arange(len(ends))
            ranges = np.stack((np.zeros_like(ends), ends), axis=1)
        return _NativePlan(metadata, tables.contiguous(), torch.from_numpy(ranges))

    def run(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        plan: _NativePlan | NativeDecodePlan,
        *,
        scale: float | None = None,
        bias: AttentionBias | None = None,
        window: int | None = None,
    ) -> torch.Tensor:
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        if isinstance(plan, NativeDecodePlan):
            ranges = plan.key_ranges[window if plan.causal else None]
            return ops.paged_attention(_dense_heads(query), cache, plan.tables, ranges, scale, None)
        ranges = plan.key_ranges if window is None or not plan.metadata.causal else _within(plan, window)
        offsets = None if bias is None else _evaluated(plan, bias, query.shape[1])
        return ops.paged_attention(_dense_heads(query), cache, plan.tables, ranges, scale, offsets)

    def make_decode_plan(
        self, num_requests: int, max_blocks: int, block_size: int, dtype: torch.dtype, heads: HeadSpec, *, causal: bool
    ) -> DecodePlan | None:
        if heads.biased:
            return None
        return NativeDecodePlan(num_requests, max_blocks, block_size, heads.windows, causal=causal)

    def write(self, cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        ops.write_cache(cache, _dense_heads(key), _dense_heads(value), slot_mapping)


def _dense_heads(x: torch.Tensor) -> torch.Tensor:
    """x [n, heads, head_dim], copied unless the heads of a token lie side by side."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _within(plan: _NativePlan, window: int) -> torch.Tensor:
    ranges = plan.windowed.get(window)
    if ranges is None:
        if plan.metadata.key_ranges is not None:
            ranges = torch.from_numpy(plan.metadata.ranges_within(window))
        else:
            begins = (plan.key_ranges[:, 1] - window).clamp_(min=0)
            ranges = torch.stack((begins, plan.key_ranges[:, 1]), dim=1)
        plan.windowed[window] = ranges
    return ranges


def _evaluated(plan: _NativePlan, bias: AttentionBias, num_heads: int) -> torch.Tensor:
    """Return [num_heads, num_tokens, max_len] in float32."""
    values = plan.biases.get(bias)
    if values is None:
        keys = torch.arange(int(plan.key_ranges[:, 1].max()))
        values = plan.metadata.evaluate(bias, keys, 0, plan.metadata.num_requests).float()
        values = plan.biases[bias] = values.expand(num_heads, -1, -1).contiguous()
    return values
