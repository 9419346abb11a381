"""Paged attention in PyTorch: the reference for other backends, and the fallback.

Decodes are one batch: their blocks are gathered into [num_decodes, max_len] keys, and the query heads of a group become
the query length, so keys are never repeated. Prefills and cross-attention run request by request: there the scores
dominate, and consecutive blocks are read as a slice, without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention.backend import AttentionBackend, FixedPlan, PlanSizes
from engine.attention.metadata import AttentionMetadata
from engine.attention.torch_fixed import MAX_KEYS, TorchDecodePlan
from engine.attention.visible import Visible, attend_once, causal_keys, decode_mask, grouped, keys_in_ranges
from engine.device.h2d import send
from engine.state.bias import AttentionBias

CPU = torch.device("cpu")
GATHER_WASTE = 2.0
"""Decodes are gathered together while padding costs less than this factor; longer ones run alone."""


@dataclass(frozen=True)
class _Single:
    """A request computed alone: its tokens, their visible keys, and the blocks of the keys."""

    start: int
    end: int
    visible: Visible
    blocks: slice | torch.Tensor
    offset: int  # of the first visible key within the blocks
    mask: torch.Tensor | None  # broadcasts to [1, num_heads, num_queries, num_keys]


@dataclass(frozen=True)
class _Masked:
    """Masks by bias and window: made by the first layer with the combination, shared by the others."""

    batched: torch.Tensor | None  # broadcasts to [num_batched, num_kv_heads, heads per group, max_len]
    rows: list[_Single]


@dataclass(frozen=True)
class _TorchPlan:
    metadata: AttentionMetadata
    block_size: int
    dtype: torch.dtype
    num_batched: int
    batched_blocks: torch.Tensor | None  # [num_batched * max_blocks]
    padding: torch.Tensor | None  # slots of these blocks behind the last key of each request
    masked: dict[tuple[AttentionBias | None, int | None], _Masked] = field(default_factory=dict)


@dataclass(frozen=True)
class Alike:
    """`count` sequences of `length` tokens each; `rows` are the tokens' rows in the batch."""

    count: int
    length: int
    rows: slice | torch.Tensor


class TorchBackend(AttentionBackend):
    """Gather blocks and call F.scaled_dot_product_attention. `device` holds the buffers of plans at fixed addresses."""

    name = "torch"
    gathered_share = 2 * GATHER_WASTE  # buffers are made twice as large as needed, to last

    def __init__(self, device: torch.device = CPU) -> None:
        self._device = device
        self._gathered: list[torch.Tensor] = []  # keys and values; kept, because fresh pages cost more than the copy

    def plan(self, metadata: AttentionMetadata, block_size: int, dtype: torch.dtype) -> _TorchPlan:
        num_batched = _num_batched(metadata)
        blocks = padding = None
        if num_batched:
            lens = np.asarray(metadata.seq_lens[:num_batched])[:, None]
            max_blocks = -(-int(lens.max()) // block_size)
            blocks = metadata.block_table[:num_batched, :max_blocks].reshape(-1)
            [padding] = send(blocks.device, np.flatnonzero(np.arange(max_blocks * block_size) >= lens))
        return _TorchPlan(metadata, block_size, dtype, num_batched, blocks, padding)

    def run(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        plan: _TorchPlan | FixedPlan,
        *,
        scale: float | None = None,
        bias: AttentionBias | None = None,
        window: int | None = None,
    ) -> torch.Tensor:
        if isinstance(plan, TorchDecodePlan):
            return plan.run(query, cache, scale, bias, window)
        assert isinstance(plan, _TorchPlan)
        masked = plan.masked.get((bias, window))
        if masked is None:
            masked = plan.masked[bias, window] = _mask(plan, bias, window, num_kv_heads=cache.shape[3])
        out = torch.empty_like(query)
        if plan.num_batched:
            queries = query[: plan.num_batched]
            out[: plan.num_batched] = self._run_batched(queries, cache, plan, masked.batched, scale)
        for row in masked.rows:
            out[row.start : row.end] = _run_row(query[row.start : row.end], cache, row, scale)
        return out

    def make_fixed_plan(self, sizes: PlanSizes) -> FixedPlan | None:
        too_many = sizes.num_tokens * sizes.max_blocks * sizes.block_size > MAX_KEYS
        return None if too_many or sizes.max_requests is not None else TorchDecodePlan(sizes, self._device)

    def _run_batched(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        plan: _TorchPlan,
        mask: torch.Tensor | None,
        scale: float | None,
    ) -> torch.Tensor:
        assert plan.batched_blocks is not None
        assert plan.padding is not None
        shape = len(query), -1, *cache.shape[3:]
        gathered = self._gather(cache, plan.batched_blocks)
        for slots in gathered:  # what others left there may be NaN, which no mask hides
            slots.view(-1, *cache.shape[3:]).index_fill_(0, plan.padding, 0)
        keys, values = (slots.view(shape).transpose(1, 2) for slots in gathered)
        return attend_once(query, keys, values, mask, scale)

    def _gather(self, cache: torch.Tensor, blocks: torch.Tensor) -> list[torch.Tensor]:
        """Keys and values of the blocks, 2 x [len(blocks), *cache.shape[2:]]; valid until the next call."""
        shape = (len(blocks), *cache.shape[2:])
        size = blocks.numel() * cache[0, 0].numel()
        if not self._gathered or self._gathered[0].numel() < size or self._gathered[0].dtype != cache.dtype:
            self._gathered = [torch.empty(2 * size, dtype=cache.dtype, device=cache.device) for _ in (0, 1)]
        return [
            torch.index_select(cache[side], 0, blocks, out=self._gathered[side][:size].view(shape)) for side in (0, 1)
        ]


def plan_ragged(lengths: Sequence[int], device: torch.device) -> list[Alike]:
    """Plan `run_ragged` for sequences of the given lengths, laid end to end; called once, used by every layer.

    Those of one length are computed together: nearly all windows of an image are.
    """
    starts: dict[int, list[int]] = {}
    for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False):
        starts.setdefault(length, []).append(start)
    return [_alike(length, firsts, device) for length, firsts in starts.items()]


def _alike(length: int, starts: list[int], device: torch.device) -> Alike:
    count = len(starts)
    if starts[-1] - starts[0] == (count - 1) * length:
        return Alike(count, length, slice(starts[0], starts[-1] + length))
    rows = np.asarray(starts, np.int64)[:, None] + np.arange(length)
    return Alike(count, length, *send(device, rows.reshape(-1)))


def run_ragged(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: list[Alike], scale: float | None
) -> torch.Tensor:
    """Compute encoder attention: every token sees all tokens of the same sequence.

    query [num_tokens, num_heads, head_dim], key and value [num_tokens, num_kv_heads, head_dim] -> as query.
    """
    out = torch.empty_like(query)
    for alike in plan:
        shape = (alike.count, alike.length)
        queries, keys, values = (x[alike.rows].view(*shape, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
        gqa = query.shape[1] != key.shape[1]
        attended = F.scaled_dot_product_attention(queries, keys, values, scale=scale, enable_gqa=gqa)
        attended = attended.transpose(1, 2).flatten(0, 1)
        if len(plan) == 1:
            return attended
        out[alike.rows] = attended
    return out


def _num_batched(metadata: AttentionMetadata) -> int:
    """Return the number of decodes to gather together: all, or none if slices are cheaper or padding would dominate."""
    if not metadata.causal or metadata.num_decodes < 2:
        return 0
    lens = metadata.seq_lens[: metadata.num_decodes]
    return metadata.num_decodes if max(lens) * len(lens) <= GATHER_WASTE * sum(lens) + 1024 else 0


def _mask(plan: _TorchPlan, bias: AttentionBias | None, window: int | None, num_kv_heads: int) -> _Masked:
    batched = None
    if plan.batched_blocks is not None:
        metadata, count = plan.metadata, plan.num_batched
        [lens] = send(metadata.block_table.device, np.asarray(metadata.seq_lens[:count], np.int64))
        max_len, values = plan.batched_blocks.numel() // count * plan.block_size, None
        if bias is not None:
            values = metadata.evaluate(bias, torch.arange(max_len, device=lens.device), 0, count)
        batched = decode_mask(lens, max_len, plan.dtype, num_kv_heads, values, window)
    rows = [
        _plan_row(plan, index, bias, window, num_kv_heads)
        for index in range(plan.num_batched, plan.metadata.num_requests)
    ]
    return _Masked(batched, rows)


def _plan_row(
    plan: _TorchPlan, index: int, bias: AttentionBias | None, window: int | None, num_kv_heads: int
) -> _Single:
    metadata, block_size = plan.metadata, plan.block_size
    start, end = metadata.query_start_loc[index], metadata.query_start_loc[index + 1]
    seq_len, device = metadata.seq_lens[index], metadata.block_table.device
    if metadata.key_ranges is not None:
        ranges = metadata.ranges_within(window if metadata.causal else None)
        visible = keys_in_ranges(ranges[start:end], device)
    elif metadata.causal:
        visible = causal_keys(end - start, seq_len, window, device)
    else:
        visible = Visible(0, seq_len)
    mask = None
    if bias is not None:
        keys = torch.arange(visible.first, visible.last, device=device)
        mask = visible.hide(metadata.evaluate(bias, keys, index, index + 1).to(plan.dtype))[None]
        if end - start == 1:
            mask = grouped(mask, num_kv_heads)
    elif visible.hidden is not None and not visible.triangular:
        mask = visible.hide(torch.zeros(visible.hidden.shape, dtype=plan.dtype, device=device))
    first_block, last_block = visible.first // block_size, -(-visible.last // block_size)
    ids = metadata.table[index, first_block:last_block]
    if len(ids) and (np.diff(ids) == 1).all():
        blocks: slice | torch.Tensor = slice(int(ids[0]), int(ids[-1]) + 1)
    else:
        [blocks] = send(device, ids)
    return _Single(start, end, visible, blocks, visible.first - first_block * block_size, mask)


def _run_row(query: torch.Tensor, cache: torch.Tensor, row: _Single, scale: float | None) -> torch.Tensor:
    num_queries, num_heads, head_dim = query.shape
    num_kv_heads, visible = cache.shape[3], row.visible
    if visible.num_keys == 0:
        return torch.zeros_like(query)
    # [num_keys, num_kv_heads, head_dim] -> [1, num_kv_heads, num_keys, head_dim]
    keys, values = (
        cache[side, row.blocks]
        .view(-1, num_kv_heads, head_dim)[row.offset : row.offset + visible.num_keys]
        .transpose(0, 1)[None]
        for side in (0, 1)
    )
    if num_queries == 1:
        return attend_once(query, keys, values, row.mask, scale)
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys,
        values,
        attn_mask=row.mask,
        is_causal=visible.triangular and row.mask is None,
        enable_gqa=num_heads != num_kv_heads,
        scale=scale,
    )
    out = out[0].transpose(0, 1)
    return out if visible.blind is None else out.masked_fill(visible.blind[:, None, None], 0)
