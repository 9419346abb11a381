"""FlashInfer's plans at fixed addresses, as CUDA graphs capture them: of decodes, and of steps with prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch

from engine.attention.backend import FixedPlan, PlanSizes
from engine.attention.flashinfer.paged_batch import PagedBatch, Phase
from engine.attention.flashinfer.wrappers import Call, DecodeWrapper, PrefillWrapper, Workspace
from engine.attention.metadata import AttentionMetadata, cross_plans_reused, is_same_batch
from engine.state.spec import IntArray

MAX_KEYS: Final = 2**16
"""Of a request beside prompts, read in one piece: with more, a replayed step would take longer than an eager one."""


class FlashInferFixedPlan(FixedPlan):
    """Buffers, and a wrapper planned into the buffers for each scale and window requested by a layer.

    FlashInfer launches the same kernels for every batch of so many tokens: how it divides the work among them is data,
    in the small workspace of each wrapper. The plan of cross-attention stands while the batch does. With
    `max_requests` the wrappers are those of prefills.
    """

    def __init__(self, workspace: Workspace, sizes: PlanSizes) -> None:
        rows, whole = sizes.max_requests or sizes.num_tokens, -(-sizes.num_tokens // sizes.block_size)
        self.takes_prompts = sizes.max_requests is not None
        most = min(MAX_KEYS // sizes.block_size, sizes.max_blocks) if self.takes_prompts else sizes.max_blocks
        super().__init__(replace(sizes, max_blocks=max(most, whole)))  # all tokens may be of one request, the padding
        self._phase: Phase = "prefill" if self.takes_prompts else "decode"
        self._workspace = workspace
        lengths = rows + 1, rows + 1, rows * self.sizes.max_blocks, rows
        self._fixed = [torch.zeros(length, dtype=torch.int32, device=workspace.device) for length in lengths]
        self._blind = torch.zeros(sizes.num_tokens, 1, 1, dtype=torch.bool, device=workspace.device)
        self._wrappers: dict[tuple[float | None, int | None], DecodeWrapper | PrefillWrapper] = {}
        self._batch: PagedBatch | None = None

    def _update(self, metadata: AttentionMetadata, num_keys: IntArray) -> None:
        if not self.sizes.causal and self._batch is not None and is_same_batch(self._batch.metadata, metadata):
            cross_plans_reused.add()
            return
        self._batch = PagedBatch(self._phase, 0, metadata, self.sizes.block_size, self._workspace.device)
        if not self.sizes.causal:
            self._blind.zero_() if self._batch.blind is None else self._blind.copy_(self._batch.blind)
        for wrapper in self._wrappers.values():
            wrapper.bring_to(self._batch)

    def run(self, query: torch.Tensor, cache: torch.Tensor, scale: float | None, window: int | None) -> torch.Tensor:
        """query [num_tokens, num_heads, head_dim] -> the same shape.

        Raises RuntimeError before the first `update`, and where a CUDA graph is captured that runs with a scale and
        window for the first time.
        """
        if self._batch is None:
            raise RuntimeError("a plan runs only after an update has told it a batch")
        sizes = self.sizes
        window = window if sizes.causal else None
        wrapper = self._wrappers.get((scale, window))
        if wrapper is None:
            call = Call(self._phase, sizes.causal, sizes.heads, sizes.block_size, sizes.dtype, scale, window)
            make = PrefillWrapper if self.takes_prompts else DecodeWrapper
            wrapper = make(self._workspace, call, self._fixed)
            wrapper.bring_to(self._batch)
            self._wrappers[scale, window] = wrapper
        out = query.new_empty(query.shape)
        wrapper.run(query, cache, out)
        return out if sizes.causal else out.masked_fill_(self._blind, 0)
