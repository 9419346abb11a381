"""Decodes at fixed addresses in plain PyTorch: every request reads the largest possible number of blocks."""

from __future__ import annotations

from typing import Final

import torch

from engine.attention.backend import FixedPlan, PlanSizes
from engine.attention.metadata import AttentionMetadata
from engine.attention.visible import attend_once, decode_mask
from engine.state.bias import AttentionBias
from engine.state.inputs import Staging
from engine.state.spec import IntArray

MAX_KEYS: Final = 2**18
"""Of a batch, padding included: with more, a replayed step would take longer than the kernels of an eager one."""


class TorchDecodePlan(FixedPlan):
    """A block table, the number of keys and the position per request; the device derives the mask."""

    def __init__(self, sizes: PlanSizes, device: torch.device) -> None:
        super().__init__(sizes)
        self._staging = Staging(device, sizes.num_tokens * (sizes.max_blocks + 2))
        self._table, self._num_keys, self._positions = self._staging.send(*self._arrays())

    def _arrays(self) -> tuple[IntArray, IntArray, IntArray]:
        take, count = self._staging.take, self.sizes.num_tokens
        return take(count, self.sizes.max_blocks), take(count), take(count)

    def _update(self, metadata: AttentionMetadata, num_keys: IntArray) -> None:
        self._staging.begin()
        table, keys, positions = self._arrays()
        width = min(metadata.table.shape[1], self.sizes.max_blocks)
        table[:, :width], table[:, width:] = metadata.table[:, :width], 0
        keys[:], positions[:] = num_keys, metadata.positions
        self._staging.send(table, keys, positions)

    def run(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        scale: float | None,
        bias: AttentionBias | None,
        window: int | None,
    ) -> torch.Tensor:
        """query [num_requests, num_heads, head_dim] -> the same shape."""
        num_kv_heads = cache.shape[3]
        max_keys, seen, addends = self._table.shape[1] * cache.shape[2], window if self.sizes.causal else None, None
        padding = torch.arange(max_keys, device=query.device) >= self._num_keys[:, None]
        keys, values = (  # what others left in padding may be NaN, which no mask hides
            cache[side][self._table].flatten(1, 2).masked_fill_(padding[:, :, None, None], 0).transpose(1, 2)
            for side in (0, 1)
        )
        if bias is not None:
            if bias.by_request:
                raise ValueError("a bias that differs by request is not computed at fixed addresses")
            addends = bias.values(self._positions, torch.arange(max_keys, device=query.device), None)
        mask = decode_mask(self._num_keys, max_keys, query.dtype, num_kv_heads, addends, seen)
        attended = attend_once(query, keys, values, mask, scale)
        return attended if self.sizes.causal else attended.masked_fill((self._num_keys == 0)[:, None, None], 0)
