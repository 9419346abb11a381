"""Paged attention equals dense masked attention, on random shapes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.backend import choose_backend
from engine.attention.metadata import AttentionMetadata
from engine.cache.block_pool import BlockPool


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> torch.Tensor:
    """softmax(QK^T / sqrt(d)) V for one sequence; the queries are the last tokens of the keys where causal."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1).transpose(0, 1).double() for x in (key, value))
    scores = query.transpose(0, 1).double() @ key.transpose(1, 2) / math.sqrt(query.shape[2])
    if causal:
        past = key.shape[1] - query.shape[0]
        future = torch.arange(key.shape[1])[None] > torch.arange(query.shape[0])[:, None] + past
        scores.masked_fill_(future, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(0, 1)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int, int, int, int, bool]:
    causal = draw(st.booleans())
    lens = []
    for _ in range(draw(st.integers(1, 5))):
        num_queries = draw(st.one_of(st.just(1), st.integers(1, 20)))
        past = draw(st.integers(0, 60))
        lens.append((num_queries, num_queries + past if causal else draw(st.integers(1, 60))))
    lens.sort(key=lambda pair: pair[0] != 1)
    num_kv_heads = draw(st.sampled_from([1, 2, 3]))
    return lens, draw(st.integers(1, 8)), num_kv_heads, draw(st.sampled_from([1, 2, 3])), 8, causal


@settings(deadline=None, max_examples=60)
@given(batches(), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 2**32 - 1))
def test_paged_equals_dense(
    batch: tuple[list[tuple[int, int]], int, int, int, int, bool], dtype: torch.dtype, seed: int
) -> None:
    lens, block_size, num_kv_heads, groups, head_dim, causal = batch
    generator = torch.Generator().manual_seed(seed)
    pool = BlockPool(400)
    cache = torch.zeros(2, 400, block_size, num_kv_heads, head_dim, dtype=dtype)
    backend = choose_backend(torch.device("cpu"))
    queries, expected, tables, slots, new_keys, new_values = [], [], [], [], [], []
    for num_queries, seq_len in lens:
        key, value = (torch.randn(seq_len, num_kv_heads, head_dim, generator=generator).to(dtype) for _ in range(2))
        query = torch.randn(num_queries, num_kv_heads * groups, head_dim, generator=generator).to(dtype)
        table = pool.allocate(-(-seq_len // block_size))
        table = [table[i] for i in torch.randperm(len(table), generator=generator).tolist()]
        slot = torch.tensor([table[i // block_size] * block_size + i % block_size for i in range(seq_len)])
        past = seq_len - num_queries if causal else seq_len
        backend.write(cache, key[:past], value[:past], slot[:past])
        slots.append(slot[past:])
        new_keys.append(key[past:])
        new_values.append(value[past:])
        queries.append(query)
        tables.append(table)
        expected.append(dense(query, key, value, causal))
    backend.write(cache, torch.cat(new_keys), torch.cat(new_values), torch.cat(slots))
    starts = [0]
    for num_queries, _ in lens:
        starts.append(starts[-1] + num_queries)
    padded = torch.zeros(len(tables), max(map(len, tables)), dtype=torch.int64)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = torch.tensor(table)
    num_decodes = sum(1 for num_queries, _ in lens if num_queries == 1)
    metadata = AttentionMetadata(
        starts, [s for _, s in lens], padded, tables, torch.cat(slots) if causal else None, causal, num_decodes
    )
    out = backend.run(torch.cat(queries), cache, backend.plan(metadata, block_size, dtype))
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(out.double(), torch.cat(expected), atol=tolerance, rtol=tolerance)


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(Exception, match="no attention backend 'magic'; there are: torch"):
        choose_backend(torch.device("cpu"), "magic")
