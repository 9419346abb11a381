"""FlashInfer's decodes at fixed addresses, as CUDA graphs capture them."""

from __future__ import annotations

import torch

from engine.attention.backend import DecodePlan
from engine.attention.flashinfer.paged_batch import Pages, page_table
from engine.attention.flashinfer.wrappers import Call, DecodeWrapper, FixedBuffers, Workspace
from engine.attention.metadata import AttentionMetadata, cross_plans_reused, is_same_batch
from engine.device.h2d import send
from engine.state.spec import HeadSpec, IntArray


class FlashInferDecodePlan(DecodePlan):
    """Buffers, and a wrapper planned into the buffers for each scale and window requested by a layer.

    FlashInfer launches the same kernels for every batch of `num_requests`: how it divides the work among them is data,
    in the small workspace of each wrapper. The plan of cross-attention stands while the batch does.
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
    ) -> None:
        super().__init__(num_requests, max_blocks, block_size, causal=causal)
        self._workspace, self._dtype, self._heads = workspace, dtype, heads
        self._fixed = FixedBuffers.make(num_requests, max_blocks, workspace.device)
        self._blind = torch.zeros(num_requests, 1, 1, dtype=torch.bool, device=workspace.device)
        self._wrappers: dict[tuple[float | None, int | None], DecodeWrapper] = {}
        self._metadata: AttentionMetadata | None = None
        self._pages: Pages | None = None

    def _update(self, metadata: AttentionMetadata, num_keys: IntArray) -> None:
        if not self.causal and is_same_batch(self._metadata, metadata):
            cross_plans_reused.add()
            return
        table = page_table(metadata.table, num_keys, self.block_size)
        if not self.causal:
            self._blind.copy_(send(self._workspace.device, table.is_empty[:, None, None])[0])
        self._metadata, self._pages = metadata, Pages.send(table, self._workspace.device)
        for wrapper in self._wrappers.values():
            wrapper.bring_to(self._pages)

    def run(self, query: torch.Tensor, cache: torch.Tensor, scale: float | None, window: int | None) -> torch.Tensor:
        """query [num_requests, num_heads, head_dim] -> the same shape.

        Raises RuntimeError before the first `update`, and where a CUDA graph is captured that runs with a scale and
        window for the first time.
        """
        if self._pages is None:
            raise RuntimeError("a decode plan runs only after an update has told it a batch")
        window = window if self.causal else None
        wrapper = self._wrappers.get((scale, window))
        if wrapper is None:
            call = Call("decode", self.causal, self._heads, self.block_size, self._dtype, scale, window)
            wrapper = DecodeWrapper(self._workspace, call, self._fixed)
            wrapper.bring_to(self._pages)
            self._wrappers[scale, window] = wrapper
        out = query.new_empty(query.shape)
        wrapper.run(query, cache, out)
        return out if self.causal else out.masked_fill_(self._blind, 0)
