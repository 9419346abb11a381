"""Block tables as kernels over pages read them: rows laid end to end, for those keys that a request's tokens see."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.attention.metadata import AttentionMetadata
from engine.state.inputs import IntArray

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True)
class PageTable:
    """The pages of n requests (compressed sparse rows, as FlashInfer takes them), on the host.

    indptr         int32 [n + 1]: the pages of request i are indices[indptr[i] : indptr[i + 1]], one at least
    indices        int32 [indptr[n]]
    last_page_len  int32 [n]: keys in the last page, 1 .. block_size
    num_keys       int32 [n]: keys in all of its pages
    is_empty       bool [n]: requests without keys. They are given one, in block 0; what comes of it must be zeros
    """

    indptr: Int32Array
    indices: Int32Array
    last_page_len: Int32Array
    num_keys: Int32Array
    is_empty: npt.NDArray[np.bool_]


def page_table(table: IntArray, num_keys: IntArray, block_size: int) -> PageTable:
    """The first `num_keys` [n] keys of each row of a block table [n, max_blocks]."""
    is_empty = num_keys == 0
    num_keys = np.maximum(num_keys, 1)
    counts = num_blocks(num_keys, block_size)
    indptr = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=indptr[1:])
    width = int(counts.max(initial=0))
    blocks = np.zeros((len(counts), width), np.int32)  # where all rows are empty, a table has no columns
    blocks[:, : table.shape[1]] = table[:, :width]
    blocks[is_empty] = 0
    indices = blocks[np.arange(width) < counts[:, None]]
    last_page_len = (num_keys - (counts - 1) * block_size).astype(np.int32)
    return PageTable(indptr, indices, last_page_len, num_keys.astype(np.int32), is_empty)


def num_blocks(num_keys: IntArray, block_size: int) -> IntArray:
    blocks: IntArray = -(-num_keys // block_size)
    return blocks


def common_keys(metadata: AttentionMetadata) -> IntArray | None:
    """[num_requests]: each token of request i sees its first `common_keys[i]` keys (or, causal, those up to itself).

    None where key ranges say otherwise: tokens of one request that see different keys, or not from the first one on.
    """
    if metadata.key_ranges is None:
        return np.asarray(metadata.seq_lens, np.int64)
    begins, ends = metadata.key_ranges[:, 0], metadata.key_ranges[:, 1]
    seen = np.where(ends > begins, ends, 0)
    starts = np.asarray(metadata.query_start_loc, np.int64)
    common = seen[starts[:-1]]
    if begins[seen > 0].any() or (seen != np.repeat(common, np.diff(starts))).any():
        return None
    return common


def is_same_batch(one: AttentionMetadata | None, other: AttentionMetadata) -> bool:
    """Whether two batches of cross-attention read the same keys for the same tokens."""
    if one is None or one is other:
        return one is other
    if one.query_start_loc != other.query_start_loc or one.seq_lens != other.seq_lens:
        return False
    if (one.key_ranges is None) != (other.key_ranges is None):
        return False
    same_ranges = one.key_ranges is None or np.array_equal(one.key_ranges, other.key_ranges)  # type: ignore[arg-type]
    return same_ranges and np.array_equal(one.table, other.table)
