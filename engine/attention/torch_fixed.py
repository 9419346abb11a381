"""Decodes at fixed addresses in plain PyTorch: every request reads the largest possible number of blocks."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from engine.attention.backend import DecodePlan
from engine.attention.metadata import AttentionMetadata
from engine.attention.visible import attend_once, decode_mask
from engine.device.h2d import overwrite
from engine.state.spec import IntArray, PositionBias

MAX_KEYS: Final = 2**18
"""Of a batch, padding included: with more, a replayed step would take longer than the kernels of an eager one."""


class TorchDecodePlan(DecodePlan):
    """A block table and the number of keys per request; the device derives the mask."""

    def __init__(
        self, num_requests: int, max_blocks: int, block_size: int, device: torch.device, *, causal: bool
    ) -> None:
        super().__init__(num_requests, max_blocks, block_size, causal=causal)
        self._table = torch.zeros(num_requests, max_blocks, dtype=torch.int64, device=device)
        self._num_keys = torch.zeros(num_requests, dtype=torch.int64, device=device)

    def _update(self, metadata: AttentionMetadata, num_keys: IntArray) -> None:
        table = np.zeros(self._table.shape, np.int64)
        width = min(metadata.table.shape[1], self.max_blocks)
        table[:, :width] = metadata.table[:, :width]
        overwrite(self._table, table)
        overwrite(self._num_keys, num_keys)

    def run(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        scale: float | None,
        bias: PositionBias | None,
        window: int | None,
    ) -> torch.Tensor:
        """query [num_requests, num_heads, head_dim] -> the same shape."""
        num_requests, _, head_dim = query.shape
        num_kv_heads = cache.shape[3]
        keys, values = (
            cache[side][self._table].view(num_requests, -1, num_kv_heads, head_dim).transpose(1, 2) for side in (0, 1)
        )
        seen = window if self.causal else None
        mask = decode_mask(self._num_keys, keys.shape[2], query.dtype, num_kv_heads, bias, seen)
        attended = attend_once(query, keys, values, mask, scale)
        return attended if self.causal else attended.masked_fill((self._num_keys == 0)[:, None, None], 0)
