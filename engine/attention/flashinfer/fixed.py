"""FlashInfer's plans at fixed addresses, as CUDA graphs capture them: of decodes, and of steps with prompts."""

from __future__ import annotations

import torch

from engine.attention.backend import DecodePlan
from engine.attention.flashinfer.paged_batch import PagedBatch, Phase
from engine.attention.flashinfer.wrappers import Call, DecodeWrapper, FixedBuffers, PrefillWrapper, Workspace
from engine.attention.metadata import AttentionMetadata, cross_plans_reused, is_same_batch
from engine.state.spec import HeadSpec, IntArray


class FlashInferDecodePlan(DecodePlan):
    """Buffers, and a wrapper planned into the buffers for each scale and window requested by a layer.

    FlashInfer launches the same kernels for every batch of `num_requests`: how it divides the work among them is data,
    in the small workspace of each wrapper. The plan of cross-attention stands while the batch does. With
    `max_requests` the wrappers are those of prefills.
    """

    def __init__(
        self,
        workspace: Workspace,
        num_requests: int,
        max_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        heads: HeadSpec,
        *,
        causal: bool,
        max_requests: int | None = None,
    ) -> None:
        max_blocks = max(max_blocks, -(-num_requests // block_size))  # all tokens may be one request's, of padding
        super().__init__(num_requests, max_blocks, block_size, causal=causal)
        self.takes_prompts = max_requests is not None
        self._phase: Phase = "prefill" if self.takes_prompts else "decode"
        self._workspace, self._dtype, self._heads = workspace, dtype, heads
        rows = max_requests or num_requests
        self._fixed = FixedBuffers.make(rows, rows * max_blocks, workspace.device)
        self._blind = torch.zeros(num_requests, 1, 1, dtype=torch.bool, device=workspace.device)
        self._wrappers: dict[tuple[float | None, int | None], DecodeWrapper | PrefillWrapper] = {}
        self._batch: PagedBatch | None = None

    def _update(self, metadata: AttentionMetadata, num_keys: IntArray) -> None:
        if not self.causal and self._batch is not None and is_same_batch(self._batch.metadata, metadata):
            cross_plans_reused.add()
            return
        self._batch = PagedBatch(self._phase, 0, metadata, self.block_size, self._workspace.device)
        if not self.causal:
            self._blind.zero_() if self._batch.blind is None else self._blind.copy_(self._batch.blind)
        for wrapper in self._wrappers.values():
            wrapper.bring_to(self._batch)

    def run(self, query: torch.Tensor, cache: torch.Tensor, scale: float | None, window: int | None) -> torch.Tensor:
        """query [num_requests, num_heads, head_dim] -> the same shape.

        Raises RuntimeError before the first `update`, and where a CUDA graph is captured that runs with a scale and
        window for the first time.
        """
        if self._batch is None:
            raise RuntimeError("a decode plan runs only after an update has told it a batch")
        window = window if self.causal else None
        wrapper = self._wrappers.get((scale, window))
        if wrapper is None:
            call = Call(self._phase, self.causal, self._heads, self.block_size, self._dtype, scale, window)
            make = PrefillWrapper if self.takes_prompts else DecodeWrapper
            wrapper = make(self._workspace, call, self._fixed)
            wrapper.bring_to(self._batch)
            self._wrappers[scale, window] = wrapper
        out = query.new_empty(query.shape)
        wrapper.run(query, cache, out)
        return out if self.causal else out.masked_fill_(self._blind, 0)
