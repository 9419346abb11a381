"""Random batches of paged attention, and what they give by dense attention in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from engine.attention.backend import AttentionBackend, PagedAttentionContext
from engine.attention.metadata import AttentionMetadata
from engine.cache.block_pool import BlockPool
from engine.state.bias import AttentionBias, AttentionMask

NUM_BLOCKS = 400
EDGE_VALUES = 8
"""How much larger the values of a request's first and last key are: one key among thousands has to be missed."""


def dense(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """softmax(Q K^T * scale + mask) V over all sequences at once, in float64; a row without any key gives zeros.

    query [num_tokens, num_heads, head_dim], key and value [num_keys, num_kv_heads, head_dim],
    mask [num_heads or 1, num_tokens, num_keys].
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1).transpose(0, 1).double() for x in (key, value))
    scale = scale or 1 / math.sqrt(query.shape[2])
    scores = query.transpose(0, 1).double() @ key.transpose(1, 2) * scale + mask
    return (scores.softmax(-1).nan_to_num(0.0) @ value).transpose(0, 1)


@dataclass(frozen=True)
class Shape:
    """`lens` are (queries, keys) of each request, those with one query first."""

    lens: list[tuple[int, int]]
    block_size: int
    num_kv_heads: int
    group: int
    head_dim: int
    causal: bool

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def query_starts(self) -> list[int]:
        return [0, *accumulate(queries for queries, _ in self.lens)]


@st.composite
def shapes(
    draw: st.DrawFn,
    causal: bool | None = None,
    head_dims: Sequence[int] = (8, 32, 64),
    max_group: int = 4,
    max_queries: int = 20,
) -> Shape:
    is_causal = draw(st.booleans()) if causal is None else causal
    lens = []
    for _ in range(draw(st.integers(1, 5))):
        num_queries = draw(st.one_of(st.just(1), st.integers(1, max_queries)))
        past = draw(st.integers(0, 60))
        lens.append((num_queries, num_queries + past if is_causal else past))
    lens.sort(key=lambda pair: pair[0] != 1)
    heads = draw(st.sampled_from([1, 2, 3])), draw(st.integers(1, max_group))
    return Shape(lens, draw(st.sampled_from([1, 3, 8, 16])), *heads, draw(st.sampled_from(head_dims)), is_causal)


class Paged:
    """Random tensors of a shape: laid end to end for the dense reference, and in shuffled blocks of a cache."""

    def __init__(self, shape: Shape, dtype: torch.dtype, seed: int) -> None:
        self.shape, self.dtype = shape, dtype
        generator = torch.Generator().manual_seed(seed)

        def random(count: int, heads: int) -> Tensor:
            return torch.randn(count, heads, shape.head_dim, generator=generator).to(dtype)

        self.query = random(shape.query_starts[-1], shape.num_heads)
        num_keys = sum(keys for _, keys in shape.lens)
        self.key, self.value = random(num_keys, shape.num_kv_heads), random(num_keys, shape.num_kv_heads)
        for last, (_, keys) in zip(accumulate(keys for _, keys in shape.lens), shape.lens, strict=True):
            if keys > 1:
                self.value[[last - keys, last - 1]] *= EDGE_VALUES
        pool = BlockPool(NUM_BLOCKS)
        self.tables: list[list[int]] = []
        slots: list[Tensor] = []
        is_new: list[bool] = []
        for queries, keys in shape.lens:
            table = pool.allocate(-(-keys // shape.block_size))
            if seed % 2 == 0:  # else they are consecutive, which backends may use
                table = [table[i] for i in torch.randperm(len(table), generator=generator).tolist()]
            self.tables.append(table)
            steps = range(keys)
            slots.append(
                torch.tensor([table[i // shape.block_size] * shape.block_size + i % shape.block_size for i in steps])
            )
            is_new += [shape.causal and i >= keys - queries for i in steps]
        self.first = [keys - queries if shape.causal else seed % 10 for queries, keys in shape.lens]
        self.requests: Any = [SimpleNamespace(number=2 + index) for index in range(len(shape.lens))]
        self.slots, self.is_new = torch.cat(slots).long(), torch.tensor(is_new, dtype=torch.bool)
        # Old values of blocks that are used again must not show: they are large, not zero.
        self.cache = torch.full((2, NUM_BLOCKS, shape.block_size, shape.num_kv_heads, shape.head_dim), 50.0).to(dtype)

    def metadata(self, key_ranges: np.ndarray | None = None) -> AttentionMetadata:
        padded = torch.zeros(len(self.tables), max(map(len, self.tables)), dtype=torch.int64)
        for row, table in enumerate(self.tables):
            padded[row, : len(table)] = torch.tensor(table)
        return AttentionMetadata(
            query_start_loc=self.shape.query_starts,
            seq_lens=[keys for _, keys in self.shape.lens],
            block_table=padded,
            slot_mapping=self.slots[self.is_new] if self.shape.causal else None,
            causal=self.shape.causal,
            num_decodes=sum(1 for queries, _ in self.shape.lens if queries == 1),
            key_ranges=key_ranges,
            num_computed_tokens=None if self.shape.causal else self.first,
            requests=self.requests,
        )

    def allowed(self, window: int | None = None, key_ranges: np.ndarray | None = None) -> Tensor:
        """[num_tokens, num_keys]: block-diagonal, and within a block causal, windowed or ranged."""
        blocks = []
        for index, (queries, keys) in enumerate(self.shape.lens):
            query, key = torch.arange(keys - queries, keys)[:, None], torch.arange(keys)[None]
            block = torch.ones(queries, keys, dtype=torch.bool)
            if self.shape.causal and key_ranges is None:
                block &= key <= query
            if window is not None:
                block &= key > query - window
            if key_ranges is not None:
                start = self.shape.query_starts[index]
                ranges = torch.from_numpy(key_ranges[start : start + queries])
                block &= (key >= ranges[:, :1]) & (key < ranges[:, 1:])
            blocks.append(block)
        return torch.block_diag(*blocks).bool()

    def ranges_ahead(self, seed: int) -> np.ndarray:
        """[num_tokens, 2]: from the first key to one behind the token, as tokens of whole inputs see keys."""
        random = np.random.default_rng(seed)
        firsts = [np.arange(keys - queries, keys) + 1 for queries, keys in self.shape.lens]
        ends = [random.integers(first, keys + 1) for first, (_, keys) in zip(firsts, self.shape.lens, strict=True)]
        return np.stack((np.zeros(self.shape.query_starts[-1], np.int64), np.concatenate(ends)), axis=1)

    def mask(self, allowed: Tensor, bias: AttentionBias | None = None) -> Tensor:
        mask = torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, float("-inf"))[None]
        if bias is None:
            return mask
        blocks = [
            bias.values(torch.arange(first, first + queries), torch.arange(keys), request)
            for first, (queries, keys), request in zip(self.first, self.shape.lens, self.requests, strict=True)
        ]
        heads = [torch.block_diag(*(block[head] for block in blocks)) for head in range(len(blocks[0]))]
        return mask + torch.stack(heads).double()

    def attend(
        self,
        backend: AttentionBackend,
        *,
        scale: float | None = None,
        bias: AttentionBias | None = None,
        window: int | None = None,
        key_ranges: np.ndarray | None = None,
    ) -> Tensor:
        old = ~self.is_new
        backend.write(self.cache, self.key[old], self.value[old], self.slots[old])
        metadata = self.metadata(key_ranges)
        if not self.shape.causal:
            nothing = AttentionMetadata([0], [], metadata.block_table[:0], self.slots[:0], True, 0)
            context = PagedAttentionContext.of_step(backend, [self.cache], nothing, metadata)
            return context.cross_attention(0, self.query, scale=scale, bias=bias)
        context = PagedAttentionContext.of_step(backend, [self.cache], metadata)
        new = self.key[self.is_new], self.value[self.is_new]
        return context.self_attention(0, self.query, *new, scale=scale, bias=bias, window=window)


class DistanceBias(AttentionBias):
    """Falls with the distance, differently for each head (as in ALiBi, Press et al., 2022), or each request, too."""

    def __init__(self, num_heads: int, *, by_request: bool = False) -> None:
        self.num_heads, self.by_request = num_heads, by_request

    def values(self, queries: Tensor, keys: Tensor, request: Any) -> Tensor:
        slope = 0.01 * (request.number if self.by_request else 5)
        slopes = torch.arange(1, self.num_heads + 1)[:, None, None] * slope
        return -slopes * (queries[:, None] - keys[None]).abs()


class SomeSeen(AttentionMask):
    """The first key, a query's own, and every n-th, with another n for each request."""

    by_request = True

    def seen(self, queries: Tensor, keys: Tensor, request: Any) -> Tensor:
        return (keys % request.number == 0) | (keys == queries[:, None])


BIASES: dict[str, Callable[[int], AttentionBias | None]] = {
    "none": lambda _: None,
    "by position": DistanceBias,
    "by request": lambda num_heads: DistanceBias(num_heads, by_request=True),
    "mask": lambda _: SomeSeen(),
}


def assert_equal(
    got: Tensor, expected: Tensor, dtype: torch.dtype, *, biased: bool = False, spread: float = 1.0
) -> None:
    """[num_tokens, num_heads, head_dim]: rounded to `dtype`, and computed from weights that were, but by no key less.

    An output of many keys is small, for these are random and weaken each other: an error is measured by the size of its
    row. Of a request with one token, the first and last keys of `Paged` are so large that they are missed among
    thousands. With `biased`, scores have been rounded, too: that is more, and says nothing of single keys.
    `spread` says how many times as large as with the usual scale the scores are: from four on, their rounding shows.
    """
    if dtype == torch.float32:
        atol = EDGE_VALUES * 1e-5 * max(1, spread / 4)
        torch.testing.assert_close(got.double(), expected, atol=atol, rtol=1e-5)
        return
    size = expected.square().mean(-1, keepdim=True).sqrt()
    allowed = torch.finfo(dtype).eps * ((24 if biased else 4) * size + expected.abs())
    excess = ((got.double() - expected).abs() / allowed.clamp_min(1e-30)).nan_to_num(math.inf)
    worst = excess.max().item() if excess.numel() else 0.0
    assert worst <= 1, f"an element is {worst:.3g} times as far off as rounding to {dtype} explains"
