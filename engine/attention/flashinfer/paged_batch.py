"""Batches for the plans of FlashInfer's wrappers; a plan belongs to a single batch object."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch

from engine.attention.backend import AttentionBackend
from engine.attention.metadata import AttentionMetadata, common_keys, num_blocks
from engine.attention.torch_backend import Alike, plan_ragged
from engine.device.h2d import pack, send, unpack
from engine.state.bias import AttentionMask
from engine.state.spec import IntArray

Phase = Literal["decode", "prefill"]


@dataclass(frozen=True)
class Pages:
    """The pages of n requests in compressed sparse rows, as expected by FlashInfer: the indices on the device, planning
    data on the host (pinned).

    indptr         int32 [n + 1]: the pages of request i are indices[indptr[i] : indptr[i + 1]], one at least
    indices        int32 [indptr[n]]
    last_page_len  int32 [n]: keys in the last page, 1 .. block_size
    num_keys       int32 [n]: keys in all of its pages

    Requests without keys are given one, in block 0; what comes of it must be zeros.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    num_keys: torch.Tensor

    @classmethod
    def of(cls, table: IntArray, num_keys: IntArray, block_size: int, device: torch.device) -> Pages:
        """Lay out the first `num_keys` [n] keys of each row of a block table [n, max_blocks].

        Starts the copy of the indices, without waiting.
        """
        given = np.maximum(num_keys, 1)
        counts = num_blocks(given, block_size)
        starts = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        width = int(counts.max(initial=0))
        blocks = np.zeros((len(counts), width), np.int32)  # where all rows are empty, a table has no columns
        blocks[:, : table.shape[1]] = table[:, :width]
        blocks[num_keys == 0] = 0
        in_last = given - (counts - 1) * block_size
        arrays = starts, in_last.astype(np.int32), given.astype(np.int32), blocks[np.arange(width) < counts[:, None]]
        indptr, last_page_len, lens, indices = unpack(pack(arrays, pin=device.type == "cuda"), arrays)
        return cls(indptr, indices.to(device, non_blocking=True), last_page_len, lens)


class PagedBatch:
    """One phase of a step: all decodes or all prefills. Derived tensors are made on first use. One of cross-attention
    may serve later steps, too.

    Its tokens are `start` .. `end` of the step's. `mask`, of `masked` ones: bool, flat, with [queries, keys] of request
    after request, on the device.
    """

    mask: torch.Tensor | None = None

    def __init__(
        self, phase: Phase, start: int, metadata: AttentionMetadata, block_size: int, device: torch.device
    ) -> None:
        self.phase: Phase = phase
        self.start, self.end = start, start + metadata.query_start_loc[-1]
        self.metadata = metadata if metadata.causal else metadata.kept()
        self.num_keys = np.asarray(metadata.seq_lens, np.int64) if metadata.causal else common_keys(metadata)
        self._block_size, self._device = block_size, device
        self._other_plan: Any = None
        self._masked: dict[tuple[AttentionMask | None, int | None], PagedBatch] = {}

    def plan_of(self, backend: AttentionBackend, dtype: torch.dtype) -> Any:
        """Another backend's plan for this batch."""
        if self._other_plan is None:
            self._other_plan = backend.plan(self.metadata, self._block_size, dtype)
        return self._other_plan

    @property
    def looks_ahead(self) -> bool:
        """Whether some tokens of self-attention see later ones: only a mask says so."""
        return self.phase == "prefill" and self.metadata.causal and self.metadata.key_ranges is not None

    def masked(self, mask: AttentionMask | None, window: int | None) -> PagedBatch:
        """Return the batch under a mask, which in self-attention holds the visible ranges and a window, too."""
        known = self._masked.get((mask, window))
        if known is None:
            rows = [self._seen(mask, index, window) for index in range(self.metadata.num_requests)]
            known = self._masked[mask, window] = copy.copy(self)
            known.mask, known._masked = torch.cat(rows), {}
        return known

    def _seen(self, mask: AttentionMask | None, index: int, window: int | None) -> torch.Tensor:
        """Return the mask of a request, flat."""
        metadata = self.metadata
        tokens = slice(metadata.query_start_loc[index], metadata.query_start_loc[index + 1])
        positions = metadata.positions[tokens]
        ends = positions + 1 if metadata.key_ranges is None else metadata.key_ranges[tokens, 1]
        queries, ends_there = send(self._device, positions, ends)
        keys = torch.arange(max(1, int(self._common_keys[index])), device=self._device)
        seen = torch.ones(len(queries), len(keys), dtype=torch.bool, device=self._device)
        if mask is not None:
            seen = seen & mask.seen(queries, keys, metadata.requests[index] if mask.by_request else None)
        if metadata.causal:
            seen &= keys < ends_there[:, None]
            if window is not None:
                seen &= keys > queries[:, None] - window
        return seen.reshape(-1)

    @cached_property
    def query_starts(self) -> torch.Tensor:
        """int32 [num_requests + 1], on the host (pinned)."""
        return _pinned(self.metadata.query_start_loc, self._device)

    @property
    def max_queries(self) -> int:
        """Largest number of queries in a request."""
        return int(np.diff(self.metadata.query_start_loc).max())

    @cached_property
    def pages(self) -> Pages:
        """Pages of a batch whose tokens share visible keys."""
        return Pages.of(self.metadata.table, self._common_keys, self._block_size, self._device)

    @cached_property
    def blind(self) -> torch.Tensor | None:
        """Mask of tokens without visible keys, bool [num_tokens, 1, 1] on the device; None if every token has keys."""
        is_empty = self._common_keys == 0
        if not is_empty.any():
            return None
        counts = np.diff(self.metadata.query_start_loc)
        [blind] = send(self._device, np.repeat(is_empty, counts)[:, None, None])
        return blind

    @property
    def _common_keys(self) -> IntArray:
        assert self.num_keys is not None
        return self.num_keys


class RaggedBatch:
    """Sequences laid end to end. `starts` int32 [n + 1], on the host (pinned), holds the beginnings and the last
    end; `mask` is flat, as in `PagedBatch`."""

    def __init__(self, lengths: Sequence[int], device: torch.device, mask: torch.Tensor | None = None) -> None:
        self.mask, self._lengths, self._device = mask, lengths, device
        self.starts = _pinned([0, *accumulate(lengths)], device)

    @cached_property
    def alike(self) -> list[Alike]:
        """PyTorch's plan for the sequences."""
        return plan_ragged(self._lengths, self._device)


def _pinned(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return int32 in pinned host memory: a copy to the device does not wait."""
    return torch.tensor(values, dtype=torch.int32, pin_memory=device.type == "cuda")
