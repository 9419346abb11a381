"""Batches as FlashInfer's wrappers are planned for them; a plan belongs to one such object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch

from engine.attention.backend import AttentionBackend
from engine.attention.metadata import AttentionMetadata
from engine.attention.page_tables import PageTable, common_keys, is_same_batch, page_table
from engine.attention.torch_backend import TorchBackend
from engine.device.h2d import pack, send, unpack

Phase = Literal["decode", "prefill"]


@dataclass(frozen=True)
class Pages:
    """A page table where FlashInfer wants it: the indices on the device, what it plans by on the host (pinned).

    `num_keys` int32 [n] are those of each request.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    num_keys: torch.Tensor

    @classmethod
    def send(cls, table: PageTable, device: torch.device) -> Pages:
        """Starts the copy of the indices, and waits for nothing."""
        arrays = table.indptr, table.last_page_len, table.num_keys, table.indices
        packed = pack(arrays, pin=device.type == "cuda")
        indptr, last_page_len, num_keys, indices = unpack(packed, arrays)
        return cls(indptr, indices.to(device, non_blocking=True), last_page_len, num_keys)


class PagedBatch:
    """One phase of the requests of a step: all decodes or all prefills. What is read of it is made when it is needed.

    Its tokens are `start` .. `end` of the step's.
    """

    def __init__(
        self, phase: Phase, start: int, metadata: AttentionMetadata, block_size: int, device: torch.device
    ) -> None:
        self.phase: Phase = phase
        self.start, self.end = start, start + metadata.query_start_loc[-1]
        self.metadata = metadata
        self.num_keys = common_keys(metadata)
        self._block_size, self._device = block_size, device
        self._other_plan: Any = None

    def is_same(self, start: int, metadata: AttentionMetadata) -> bool:
        """Whether these are other words for this batch, of cross-attention."""
        return self.start == start and is_same_batch(self.metadata, metadata)

    def plan_of(self, backend: AttentionBackend, dtype: torch.dtype) -> Any:
        """Another backend's plan for this batch."""
        if self._other_plan is None:
            self._other_plan = backend.plan(self.metadata, self._block_size, dtype)
        return self._other_plan

    @cached_property
    def query_starts(self) -> torch.Tensor:
        """int32 [num_requests + 1], on the host (pinned)."""
        return _pinned(self.metadata.query_start_loc, self._device)

    @property
    def max_queries(self) -> int:
        """Of one request."""
        return int(np.diff(self.metadata.query_start_loc).max())

    @cached_property
    def pages(self) -> Pages:
        """Only for a batch whose tokens see common keys."""
        return Pages.send(self._table, self._device)

    @cached_property
    def blind(self) -> torch.Tensor | None:
        """[num_tokens, 1, 1], bool, on the device: tokens that see no key. None where all see one."""
        if not self._table.is_empty.any():
            return None
        counts = np.diff(self.metadata.query_start_loc)
        [blind] = send(self._device, np.repeat(self._table.is_empty, counts)[:, None, None])
        return blind

    @cached_property
    def _table(self) -> PageTable:
        assert self.num_keys is not None
        return page_table(self.metadata.table, self.num_keys, self._block_size)


class RaggedBatch:
    """Sequences laid end to end. `starts` int32 [n + 1], on the host (pinned): where each begins, and the last one
    ends."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = tuple(lengths)
        self.starts = _pinned([0, *accumulate(lengths)], device)
        self._other_plan: Any = None

    def plan_of(self, backend: TorchBackend) -> Any:
        """PyTorch's plan for these sequences."""
        if self._other_plan is None:
            self._other_plan = backend.plan_ragged(self.lengths)
        return self._other_plan


def _pinned(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """int32 on the host, where a copy to the device does not wait for it."""
    return torch.tensor(values, dtype=torch.int32, pin_memory=device.type == "cuda")
