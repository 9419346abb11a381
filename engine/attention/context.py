"""What a model sees of attention during one forward pass: two calls, self and cross."""

from __future__ import annotations

from typing import Any

import torch

from engine.attention.backend import AttentionBackend
from engine.attention.metadata import AttentionMetadata
from engine.device.h2d import send
from engine.state.spec import PositionBias


class PagedAttentionContext:
    """Plans of one step, shared by all layers. Implements `AttentionContext`.

    `caches[layer]` serves self- and cross-attention alike, each counting its own layers: a block belongs to one of
    them, and its number leads into the same tensor.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        caches: list[torch.Tensor],
        slot_mapping: torch.Tensor,
        self_plan: Any,
        cross_plan: Any = None,
        after_input: torch.Tensor | None = None,
    ) -> None:
        """The plans are the backend's: of `plan` for one step, or of `make_decode_plan` for a graph's."""
        self._backend = backend
        self._caches = caches
        self._slot_mapping = slot_mapping
        self._self_plan = self_plan
        self._cross_plan = cross_plan
        self.has_cross = cross_plan is not None
        self.after_input = after_input

    @classmethod
    def of_step(
        cls,
        backend: AttentionBackend,
        caches: list[torch.Tensor],
        self_metadata: AttentionMetadata,
        cross_metadata: AttentionMetadata | None = None,
    ) -> PagedAttentionContext:
        """Plans one step."""
        block_size, dtype = caches[0].shape[2], caches[0].dtype
        assert self_metadata.slot_mapping is not None
        self_plan = backend.plan(self_metadata, block_size, dtype)
        if cross_metadata is None:
            return cls(backend, caches, self_metadata.slot_mapping, self_plan)
        cross_plan = backend.plan(cross_metadata, block_size, dtype)
        after_input = None
        if cross_metadata.after_input is not None:
            [after_input] = send(cross_metadata.block_table.device, cross_metadata.after_input)
        return cls(backend, caches, self_metadata.slot_mapping, self_plan, cross_plan, after_input)

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
