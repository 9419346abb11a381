"""Attention metadata of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from common.telemetry import Counter
from engine.device.h2d import send
from engine.state.bias import AttentionBias
from engine.state.request import Request
from engine.state.spec import IntArray

BoolArray = npt.NDArray[np.bool_]

cross_plans_reused = Counter()
"""Plans of cross-attention that served another step of the same batch; decodes and prefills count apart."""


@dataclass(frozen=True)
class AttentionMetadata:
    """Metadata of self- or cross-attention for a forward pass.

    Requests with a single query token (decodes) come first, `num_decodes` of them.

    query_start_loc  [num_requests + 1] on the host: tokens of request i are query_start_loc[i] .. [i + 1]
    seq_lens         [num_requests] on the host: keys that request i attends to, those of this step included; 0 is
                     allowed for cross-attention (a request without an input): its tokens get zeros
    block_table      [num_requests, max_blocks] on the device
    slot_mapping     [num_tokens] on the device: where each token's key and value are written; None for cross-attention,
                     whose blocks are read-only
    key_ranges       [num_tokens, 2] on the host: token t sees keys key_ranges[t, 0] .. [t, 1] of its request. None
                     where all tokens see all keys (cross-attention) or those up to themselves (self-attention, whose
                     ranges begin at 0). In cross-attention a token with an empty range gets zeros.
    host_table       block_table on the host, where the runner has it; `table` brings it there otherwise
    after_input      [num_tokens] on the host, for cross-attention: whether an input stands at a token or before it;
                     None where one does for all of them
    num_computed_tokens
                     [num_requests]: position of each request's first token; None where the tokens are the last of the
                     keys (self-attention), or nobody asks (cross-attention without a bias)
    requests         [num_requests], for biases by request; empty where nobody asks
    """

    query_start_loc: list[int]
    seq_lens: list[int]
    block_table: torch.Tensor
    slot_mapping: torch.Tensor | None
    causal: bool
    num_decodes: int
    key_ranges: IntArray | None = None
    after_input: BoolArray | None = None
    host_table: IntArray | None = None
    num_computed_tokens: list[int] | None = None
    requests: Sequence[Request] = ()

    @property
    def num_requests(self) -> int:
        return len(self.seq_lens)

    @property
    def table(self) -> IntArray:
        """Return the block table [num_requests, max_blocks] on the host; waits for a table on the device."""
        if self.host_table is not None:
            return self.host_table
        table: IntArray = self.block_table.cpu().numpy()
        return table

    @cached_property
    def positions(self) -> IntArray:
        """Position of each token in its sequence, [num_tokens]."""
        counts, known = np.diff(self.query_start_loc), self.num_computed_tokens
        first = np.asarray(self.seq_lens) - counts if known is None else np.asarray(known)
        positions: IntArray = np.repeat(first - self.query_start_loc[:-1], counts) + np.arange(counts.sum())
        return positions

    def ranges_within(self, window: int | None) -> IntArray:
        """Return the `key_ranges` of self-attention where a token sees the last `window` keys up to itself, and all
        visible ones behind it."""
        assert self.key_ranges is not None
        if window is None:
            return self.key_ranges
        begins = np.maximum(self.positions + 1 - window, 0)
        return np.stack((begins, self.key_ranges[:, 1]), axis=1)

    def evaluate(self, bias: AttentionBias, keys: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """Return a bias of the tokens of requests `begin` .. `end` for `keys` [k]: [num_heads or 1, n, k]."""
        starts = self.query_start_loc[begin : end + 1]
        [queries] = send(keys.device, self.positions[starts[0] : starts[-1]])
        if not bias.by_request:
            return bias.values(queries, keys, None)
        parts = zip(torch.split(queries, np.diff(starts).tolist()), self.requests[begin:end], strict=True)
        return torch.cat([bias.values(own, keys, request) for own, request in parts], dim=1)

    def kept(self) -> AttentionMetadata:
        """Return the same with arrays of its own: those of a step are written anew by a later one."""
        ranges = None if self.key_ranges is None else self.key_ranges.copy()
        return replace(self, key_ranges=ranges, host_table=self.table.copy())

    def decodes(self) -> AttentionMetadata:
        """The part of the requests with a single query token: tokens 0 .. num_decodes."""
        return self._part(0, self.num_decodes)

    def prefills(self) -> AttentionMetadata:
        """The part of the others: tokens num_decodes .. num_tokens, counted from 0 again."""
        return self._part(self.num_decodes, self.num_requests)

    def _part(self, begin: int, end: int) -> AttentionMetadata:
        first, last = self.query_start_loc[begin], self.query_start_loc[end]
        return replace(
            self,
            query_start_loc=[start - first for start in self.query_start_loc[begin : end + 1]],
            seq_lens=self.seq_lens[begin:end],
            block_table=self.block_table[begin:end],
            slot_mapping=None if self.slot_mapping is None else self.slot_mapping[first:last],
            num_decodes=min(self.num_decodes, end) - begin,
            key_ranges=None if self.key_ranges is None else self.key_ranges[first:last],
            after_input=None if self.after_input is None else self.after_input[first:last],
            host_table=None if self.host_table is None else self.host_table[begin:end],
            num_computed_tokens=None if self.num_computed_tokens is None else self.num_computed_tokens[begin:end],
            requests=self.requests[begin:end],
        )


def num_blocks(num_keys: IntArray, block_size: int) -> IntArray:
    blocks: IntArray = -(-num_keys // block_size)
    return blocks


def common_keys(metadata: AttentionMetadata) -> IntArray | None:
    """Return [num_requests]: each token of request i sees the first `common_keys[i]` keys (causal: up to the token).

    None where key ranges say otherwise: tokens of one request that see different keys, or not from the first one on.
    """
    if metadata.key_ranges is None:
        return np.asarray(metadata.seq_lens, np.int64)
    begins, ends = metadata.key_ranges[:, 0], metadata.key_ranges[:, 1]
    seen = np.where(ends > begins, ends, 0)
    starts = np.asarray(metadata.query_start_loc, np.int64)
    counts = np.diff(starts)
    common = np.where(counts > 0, seen.take(starts[:-1], mode="clip"), 0)
    if begins[seen > 0].any() or (seen != np.repeat(common, counts)).any():
        return None
    return common


def is_same_batch(one: AttentionMetadata, other: AttentionMetadata) -> bool:
    """Whether two batches of cross-attention read the same keys for the same tokens, with the same bias."""
    if one is other:
        return True
    if one.query_start_loc != other.query_start_loc or one.seq_lens != other.seq_lens:
        return False
    if one.num_computed_tokens != other.num_computed_tokens or one.requests != other.requests:
        return False
    if (one.key_ranges is None) != (other.key_ranges is None):
        return False
    same_ranges = one.key_ranges is None or np.array_equal(one.key_ranges, other.key_ranges)  # type: ignore[arg-type]
    return same_ranges and np.array_equal(one.table, other.table)
