"""What a model sees of attention during one forward pass: two calls, self and cross."""

from __future__ import annotations

import torch

from engine.attention.backend import AttentionBackend
from engine.attention.metadata import AttentionMetadata
from engine.models.base import PositionBias


class PagedAttentionContext:
    """Plans of one step, shared by all layers. Implements `AttentionContext`.

    `caches[layer]` serves self- and cross-attention alike, each counting its own layers: a block belongs to one of
    them, and its number leads into the same tensor.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        caches: list[torch.Tensor],
        self_metadata: AttentionMetadata,
        cross_metadata: AttentionMetadata | None = None,
    ) -> None:
        self._backend = backend
        self._caches = caches
        block_size, dtype = caches[0].shape[2], caches[0].dtype
        assert self_metadata.slot_mapping is not None
        self._slot_mapping = self_metadata.slot_mapping
        self.has_cross = cross_metadata is not None
        self.after_input = None if cross_metadata is None else cross_metadata.after_input
        self._self_plan = backend.plan(self_metadata, block_size, dtype)
        self._cross_plan = backend.plan(cross_metadata, block_size, dtype) if cross_metadata is not None else None

    def self_attention(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float | None = None,
        bias: PositionBias | None = None,
        window: int | None = None,
    ) -> torch.Tensor:
        """Write this step's keys and values, then attend causally. Shapes: [num_tokens, heads, head_dim]."""
        cache = self._caches[layer]
        self._backend.write(cache, key, value, self._slot_mapping)
        return self._backend.run(query, cache, self._self_plan, scale=scale, bias=bias, window=window)

    def cross_attention(self, layer: int, query: torch.Tensor, *, scale: float | None = None) -> torch.Tensor:
        """Attend to the encoder's keys that each token may see. Shape: [num_tokens, num_heads, head_dim]."""
        return self._backend.run(query, self._caches[layer], self._cross_plan, scale=scale)
