"""Decodes at fixed addresses in plain PyTorch: every request reads the largest possible number of blocks."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention.backend import DecodePlan
from engine.attention.metadata import AttentionMetadata
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
        num_requests, num_heads, head_dim = query.shape
        num_kv_heads = cache.shape[3]
        keys, values = (
            cache[side][self._table].view(num_requests, -1, num_kv_heads, head_dim).transpose(1, 2) for side in (0, 1)
        )
        grouped = query.reshape(num_requests, num_kv_heads, num_heads // num_kv_heads, head_dim)
        mask = self._mask(keys.shape[2], query.dtype, bias, window if self.causal else None)
        if bias is not None:
            mask = mask.view(num_requests, num_kv_heads, -1, mask.shape[-1])
        attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
        attended = attended.reshape(query.shape)
        return attended if self.causal else attended.masked_fill((self._num_keys == 0)[:, None, None], 0)

    def _mask(self, max_keys: int, dtype: torch.dtype, bias: PositionBias | None, window: int | None) -> torch.Tensor:
        """Return [num_requests, num_heads or 1, 1, max_keys]: 0 or the bias for visible keys, -inf for hidden keys.

        Requests without keys see the first one, for a softmax over nothing would be NaN.
        """
        num_keys, keys = self._num_keys[:, None], torch.arange(max_keys, device=self._num_keys.device)
        hidden = keys >= num_keys.clamp(min=1)
        if window is not None:
            hidden |= keys < num_keys - window
        if bias is None:
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            return mask.masked_fill_(hidden, float("-inf"))[:, None, None]
        biases = bias(self._num_keys - 1, keys).to(dtype)  # [num_heads, num_requests, max_keys]
        return biases.masked_fill(hidden, float("-inf")).transpose(0, 1)[:, :, None]
