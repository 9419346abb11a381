"""Paged attention in plain PyTorch: the CPU's backend (fp32 and bf16), and the reference for the others.

Decodes are one batch: their blocks are gathered into [num_decodes, max_len] keys, and the query heads of a group become
the query length, so keys are never repeated. Prefills and cross-attention run request by request: there the scores
dominate, and consecutive blocks are read as a slice, without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

from engine.attention.backend import AttentionBackend
from engine.attention.metadata import AttentionMetadata

GATHER_WASTE = 2.0
"""Decodes are gathered together while padding costs less than this factor; longer ones run alone."""


@dataclass(frozen=True)
class _Row:
    """One request that runs alone: its tokens, its keys, and which future they may not see."""

    start: int
    end: int
    seq_len: int
    blocks: slice | torch.Tensor
    mask: torch.Tensor | None  # [num_queries, seq_len], added to the scores
    causal: bool  # True where a plain lower triangle is enough


@dataclass(frozen=True)
class _Plan:
    num_batched: int
    batched_blocks: torch.Tensor | None  # [num_batched * max_blocks]
    batched_mask: torch.Tensor | None  # [num_batched, 1, 1, max_len]
    rows: list[_Row]
    slot_mapping: torch.Tensor | None


class TorchBackend(AttentionBackend):
    """Gather and F.scaled_dot_product_attention."""

    name = "torch"

    def __init__(self) -> None:
        self._gathered: list[torch.Tensor] = []  # keys and values; kept, because fresh pages cost more than the copy

    def plan(self, metadata: AttentionMetadata, block_size: int, dtype: torch.dtype) -> _Plan:
        num_batched = self._num_batched(metadata)
        blocks = mask = None
        if num_batched:
            lens = metadata.seq_lens[:num_batched]
            max_blocks = -(-max(lens) // block_size)
            blocks = metadata.block_table[:num_batched, :max_blocks].reshape(-1)
            mask = _length_mask(lens, max_blocks * block_size, dtype, blocks.device)
        rows = [
            self._plan_row(metadata, index, block_size, dtype) for index in range(num_batched, metadata.num_requests)
        ]
        return _Plan(num_batched, blocks, mask, rows, metadata.slot_mapping)

    def _num_batched(self, metadata: AttentionMetadata) -> int:
        """Decodes to gather together: all of them, or none where slices are cheaper or padding would dominate."""
        if not metadata.causal or metadata.num_decodes < 2:
            return 0
        lens = metadata.seq_lens[: metadata.num_decodes]
        return metadata.num_decodes if max(lens) * len(lens) <= GATHER_WASTE * sum(lens) + 1024 else 0

    def _plan_row(self, metadata: AttentionMetadata, index: int, block_size: int, dtype: torch.dtype) -> _Row:
        start, end = metadata.query_start_loc[index], metadata.query_start_loc[index + 1]
        num_queries, seq_len = end - start, metadata.seq_lens[index]
        num_blocks = -(-seq_len // block_size)
        ids = metadata.block_lists[index][:num_blocks]
        consecutive = ids[-1] - ids[0] == num_blocks - 1 and all(b - a == 1 for a, b in pairwise(ids))
        device = metadata.block_table.device
        blocks = slice(ids[0], ids[-1] + 1) if consecutive else torch.tensor(ids, device=device)
        causal = metadata.causal and num_queries > 1
        square = num_queries == seq_len
        mask = None if not causal or square else _causal_mask(num_queries, seq_len, dtype, device)
        return _Row(start, end, seq_len, blocks, mask, causal and square)

    def run(self, query: torch.Tensor, cache: torch.Tensor, plan: _Plan) -> torch.Tensor:
        out = torch.empty_like(query)
        if plan.num_batched:
            out[: plan.num_batched] = self._run_batched(query[: plan.num_batched], cache, plan)
        for row in plan.rows:
            out[row.start : row.end] = self._run_row(query[row.start : row.end], cache, row)
        return out

    def _run_batched(self, query: torch.Tensor, cache: torch.Tensor, plan: _Plan) -> torch.Tensor:
        num, num_heads, head_dim = query.shape
        num_kv_heads = cache.shape[3]
        assert plan.batched_blocks is not None
        keys, values = (
            gathered.view(num, -1, num_kv_heads, head_dim).transpose(1, 2)
            for gathered in self._gather(cache, plan.batched_blocks)
        )
        grouped = query.view(num, num_kv_heads, num_heads // num_kv_heads, head_dim)
        return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=plan.batched_mask).reshape(query.shape)

    def _gather(self, cache: torch.Tensor, blocks: torch.Tensor) -> list[torch.Tensor]:
        """Keys and values of the blocks, 2 x [len(blocks), *cache.shape[2:]]; valid until the next call."""
        shape = (len(blocks), *cache.shape[2:])
        size = blocks.numel() * cache[0, 0].numel()
        if not self._gathered or self._gathered[0].numel() < size or self._gathered[0].dtype != cache.dtype:
            self._gathered = [torch.empty(2 * size, dtype=cache.dtype, device=cache.device) for _ in (0, 1)]
        return [
            torch.index_select(cache[side], 0, blocks, out=self._gathered[side][:size].view(shape)) for side in (0, 1)
        ]

    def _run_row(self, query: torch.Tensor, cache: torch.Tensor, row: _Row) -> torch.Tensor:
        num_queries, num_heads, head_dim = query.shape
        num_kv_heads = cache.shape[3]
        # [seq_len, num_kv_heads, head_dim] -> [1, num_kv_heads, seq_len, head_dim]
        keys, values = (
            cache[side, row.blocks].view(-1, num_kv_heads, head_dim)[: row.seq_len].transpose(0, 1)[None]
            for side in (0, 1)
        )
        if num_queries == 1:
            grouped = query.view(1, num_kv_heads, num_heads // num_kv_heads, head_dim)
            return F.scaled_dot_product_attention(grouped, keys, values).reshape(query.shape)
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys,
            values,
            attn_mask=row.mask,
            is_causal=row.causal,
            enable_gqa=num_heads != num_kv_heads,
        )
        return out[0].transpose(0, 1)


def _length_mask(lens: list[int], max_len: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[len(lens), 1, 1, max_len]: 0 for keys that exist, -inf for padding."""
    beyond = torch.arange(max_len)[None] >= torch.tensor(lens)[:, None]
    mask = torch.zeros(len(lens), max_len, dtype=dtype).masked_fill_(beyond, float("-inf"))
    return mask[:, None, None].to(device)


def _causal_mask(num_queries: int, seq_len: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[num_queries, seq_len]: the last num_queries rows of a lower triangle."""
    future = torch.arange(seq_len)[None] > torch.arange(seq_len - num_queries, seq_len)[:, None]
    return torch.zeros(num_queries, seq_len, dtype=dtype).masked_fill_(future, float("-inf")).to(device)
