"""The seam between attention and its computation: a backend plans once per step and runs once per layer.

Two kinds of attention, one interface:

    self     paged, causal      keys of this step are written first, then every query sees the past of its request
    cross    paged, not causal  keys were written when the request began; every query sees all, or its key range

Encoders have no cache: sequences laid end to end, each of which sees itself in both directions (`flashinfer/ragged.py`,
and `torch_backend.run_ragged` for what is left over there).

A model adds a bias to the scores of either kind, or masks keys (`engine.state.bias`). Encoders' layers pass theirs as
transformers' do (`engine.encoders.attention`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.metadata import AttentionMetadata, common_keys, num_blocks
from engine.device.h2d import send
from engine.state.bias import AttentionBias
from engine.state.inputs import EncoderRows
from engine.state.spec import HeadSpec, IntArray


@dataclass(frozen=True)
class PlanSizes:
    """Sizes of a plan at fixed addresses: `num_tokens` tokens, of requests with up to `max_blocks` blocks.

    A token per request; with `max_requests`, of exactly so many requests, some of them without tokens.
    """

    num_tokens: int
    max_blocks: int
    block_size: int
    dtype: torch.dtype
    heads: HeadSpec
    causal: bool
    max_requests: int | None = None


class FixedPlan(ABC):
    """A plan at fixed addresses, as captured by CUDA graphs. One that `takes_prompts` takes any tokens of a request.

    A captured graph replays the same kernels over the same addresses, so what changes from step to step is written
    into buffers that this plan owns. `update`, on the host, comes before the replay; `run` of the backend that made
    the plan is what a graph captures. Layers with another scale or window may ask for more buffers, which must exist
    before the capture: run the step once as it is, then capture it.
    """

    takes_prompts = False

    def __init__(self, sizes: PlanSizes) -> None:
        self.sizes = sizes

    def _served_keys(self, metadata: AttentionMetadata) -> IntArray | None:
        """Return the keys of each request, [num_requests]; None if this plan does not serve the batch."""
        sizes, num_keys, starts = self.sizes, common_keys(metadata), metadata.query_start_loc
        if sizes.max_requests is None:
            fits = starts == list(range(sizes.num_tokens + 1))
        else:
            fits = starts[-1] == sizes.num_tokens and not (sizes.causal and metadata.key_ranges is not None)
        if num_keys is None or metadata.causal != sizes.causal or not fits:
            return None
        return num_keys if int(num_blocks(num_keys, sizes.block_size).max(initial=0)) <= sizes.max_blocks else None

    def refuse(self, bias: AttentionBias | None) -> None:
        """Raise ValueError for a bias; for plans that compute none."""
        if bias is not None:
            raise ValueError("a decoder that adds a bias to its attention names the kind in its spec (`biased`)")

    def update(self, metadata: AttentionMetadata) -> bool:
        """Fill the buffers for a batch of exactly as many tokens as the sizes say.

        Rows of padding have one key, in block 0, or, in cross-attention, none: these get zeros. Returns False, with the
        buffers as they were, if the plan does not serve the batch: the step has to run outside the graph.
        """
        num_keys = self._served_keys(metadata)
        if num_keys is None:
            return False
        self._update(metadata, num_keys)
        return True

    @abstractmethod
    def _update(self, metadata: AttentionMetadata, num_keys: IntArray) -> None:
        """Fill the buffers for a served batch with the first `num_keys` [num_requests] keys visible."""


class AttentionBackend(ABC):
    """Attention over one layer's cache, [2, num_blocks, block_size, num_kv_heads, head_dim] (keys, values).

    `plan` does the host work that all layers share. All backends share the layout of the cache, so that two of them
    can serve the two phases of one batch.
    """

    name: str
    gathered_share: float = 0.0
    """Largest copy of one layer's cache that a decode step keeps, as a multiple of the cache."""
    slot_dtype: torch.dtype = torch.int64
    """The type of slot mappings that `write` takes without a conversion; it takes int64 and int32."""
    calls_kernels: bool = False
    """Whether what `make_fixed_plan` returns runs as calls of `engine.native`, which a CPU can replay."""
    is_fallback: bool = False
    """Whether another backend would have been taken, had it been able to run here."""

    @abstractmethod
    def plan(self, metadata: AttentionMetadata, block_size: int, dtype: torch.dtype) -> Any:
        """Make the plan of a step; called once, used by every layer in `run`."""

    @abstractmethod
    def run(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        plan: Any,
        *,
        scale: float | None = None,
        bias: AttentionBias | None = None,
        window: int | None = None,
    ) -> torch.Tensor:
        """query [num_tokens, num_heads, head_dim] -> the same shape.

        `scale` is 1 / sqrt(head_dim) if not given. `bias` is added to the scaled scores. With a `window`, a query of
        causal attention sees the last `window` keys, its own included (Mistral, Jiang et al., 2023).
        """

    def make_fixed_plan(self, sizes: PlanSizes) -> FixedPlan | None:
        """Return a plan at fixed addresses; None if the backend has none."""
        return None

    def write(self, cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Put key and value, [num_tokens, num_kv_heads, head_dim], into their slots, [num_tokens]."""
        slot_mapping = slot_mapping.long()
        flat = cache.view(2, -1, *cache.shape[3:])
        flat[0].index_copy_(0, slot_mapping, key)
        flat[1].index_copy_(0, slot_mapping, value)


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """x [n, heads, head_dim], copied unless the elements of a token lie together."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


@dataclass(frozen=True)
class PagedAttentionContext:
    """Plans of a step, shared by all layers. Implements `AttentionContext`.

    Plans are the backend's: of `plan` for one step, or of `make_fixed_plan` for a CUDA graph. `caches[layer]` serves
    self- and cross-attention alike, each counting its own layers: a block belongs to one kind of attention, and its
    number indexes the same tensor. `cross_queries`, where given, keeps the queries of cross-attention by layer.
    Without `select`, all rows are read.
    """

    backend: AttentionBackend
    caches: list[torch.Tensor]
    slot_mapping: torch.Tensor
    self_plan: Any
    cross_plan: Any = None
    after_input: torch.Tensor | None = None
    encoder_rows: EncoderRows | None = None
    cross_queries: dict[int, torch.Tensor] | None = None
    select: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def has_cross(self) -> bool:
        return self.cross_plan is not None

    @classmethod
    def of_step(
        cls,
        backend: AttentionBackend,
        caches: list[torch.Tensor],
        self_metadata: AttentionMetadata,
        cross_metadata: AttentionMetadata | None = None,
    ) -> PagedAttentionContext:
        """Plan a step."""
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
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        cache = self.caches[layer]
        self.backend.write(cache, key, value, self.slot_mapping)
        return self.backend.run(query, cache, self.self_plan, **options)

    def select_read(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.select is None else self.select(x)

    def cross_attention(self, layer: int, query: torch.Tensor, **options: Any) -> torch.Tensor:
        if self.cross_queries is not None:
            self.cross_queries[layer] = query
        return self.backend.run(query, self.caches[layer], self.cross_plan, **options)
