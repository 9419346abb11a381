"""Attention by FlashInfer's kernels (Ye et al., 2025) on CUDA: paged self- and cross-attention.

    self     decodes: decode wrapper     prefills: prefill wrapper, causal
    cross    decodes: decode wrapper     prefills: prefill wrapper, not causal     (decodes attend to all their pages)
    masked   prefill wrapper with a custom mask, whatever the kind and phase

Decodes and prefills of an eager step are two launches for each layer. A wrapper is planned for a step when the first
layer of its heads, scale and window asks, and the other layers of its kind share the plan.
What FlashInfer does not serve (`served.py`) goes to PyTorch's attention, and the log tells once of each reason.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.attention.backend import AttentionBackend, FixedPlan, PlanSizes
from engine.attention.flashinfer import wrappers
from engine.attention.flashinfer.fixed import FlashInferFixedPlan
from engine.attention.flashinfer.paged_batch import PagedBatch, Phase
from engine.attention.flashinfer.served import ReasonLog, is_appended, unserved
from engine.attention.metadata import AttentionMetadata, cross_plans_reused, is_same_batch
from engine.attention.select import kernels_missing
from engine.attention.torch_backend import TorchBackend
from engine.device.h2d import send
from engine.state.bias import AttentionBias, AttentionMask
from engine.state.spec import HeadSpec


class FlashInferBackend(AttentionBackend):
    """All phases on CUDA, in float16 and bfloat16. Raises ImportError where FlashInfer is not installed.

    Wrappers and the pages of the last batches are kept; one thread and one stream use a backend.
    """

    name = "flashinfer"
    slot_dtype = torch.int32

    def __init__(self, device: torch.device, dtype: torch.dtype, heads: HeadSpec) -> None:
        self._device = device
        self._workspace = wrappers.Workspace(wrappers.load_flashinfer(), device, wrappers.WORKSPACE_BYTES)
        self._appender = _Appender(self._workspace)
        self._torch = TorchBackend(device)
        self.gathered_share = 0.0 if unserved(heads, dtype) is None else self._torch.gathered_share
        self._wrappers: dict[wrappers.Call, wrappers.DecodeWrapper | wrappers.PrefillWrapper] = {}
        self._cross: dict[Phase, PagedBatch] = {}
        self._reasons = ReasonLog()
        self._no_masks: str | None = None

    def plan(self, metadata: AttentionMetadata, block_size: int, dtype: torch.dtype) -> list[PagedBatch]:
        batches, num_decodes = [], metadata.num_decodes
        if num_decodes:
            batches.append(self._batch("decode", 0, metadata.decodes(), block_size))
        if num_decodes < metadata.num_requests:
            batches.append(self._batch("prefill", num_decodes, metadata.prefills(), block_size))
        return batches

    def _batch(self, phase: Phase, start: int, metadata: AttentionMetadata, block_size: int) -> PagedBatch:
        """Return a phase of a step; for cross-attention the previous batch and plan while the requests are the same."""
        batch = None if metadata.causal else self._cross.get(phase)
        if batch is not None and batch.start == start and is_same_batch(batch.metadata, metadata):
            cross_plans_reused.add()
            return batch
        batch = PagedBatch(phase, start, metadata, block_size, self._device)
        if not metadata.causal:
            self._cross[phase] = batch
        return batch

    def run(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        plan: list[PagedBatch] | FixedPlan,
        *,
        scale: float | None = None,
        bias: AttentionBias | None = None,
        window: int | None = None,
    ) -> torch.Tensor:
        if isinstance(plan, FlashInferFixedPlan):
            plan.refuse(bias)
            return plan.run(query, cache, scale, window)
        if isinstance(plan, FixedPlan):
            return self._torch.run(query, cache, plan, scale=scale, bias=bias, window=window)
        out = query.new_empty(query.shape)
        mask = bias if isinstance(bias, AttentionMask) else None
        heads = HeadSpec(query.shape[1], cache.shape[3], query.shape[2], biased=bias is not mask)
        for batch in plan:
            queries, attended = query[batch.start : batch.end], out[batch.start : batch.end]
            reason = unserved(heads, query.dtype, has_ranges=batch.num_keys is None)
            is_masked = mask is not None or batch.looks_ahead
            reason = reason or (self._no_masks if is_masked else None)
            if reason is None:
                try:
                    shown = batch.masked(mask, window if batch.metadata.causal else None) if is_masked else batch
                    self._run_batch(queries, cache, shown, attended, scale, window)
                except Exception as error:  # the kernel that packs masks is tried here, not at start
                    if not is_masked:
                        raise
                    reason = self._no_masks = kernels_missing(error)
            if reason is not None:
                self._reasons.warn(reason)
                torch_plan = batch.plan_of(self._torch, query.dtype)
                attended.copy_(self._torch.run(queries, cache, torch_plan, scale=scale, bias=bias, window=window))
        return out

    def _run_batch(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        batch: PagedBatch,
        out: torch.Tensor,
        scale: float | None,
        window: int | None,
    ) -> None:
        masked, (_, _, block_size, num_kv_heads, head_dim) = batch.mask is not None, cache.shape
        causal = batch.metadata.causal and not masked
        heads, seen = HeadSpec(query.shape[1], num_kv_heads, head_dim), window if causal else None
        call = wrappers.Call(batch.phase, causal, heads, block_size, query.dtype, scale, seen, masked)
        wrapper = self._wrappers.get(call)
        if wrapper is None:
            make = wrappers.DecodeWrapper if batch.phase == "decode" and not masked else wrappers.PrefillWrapper
            wrapper = self._wrappers[call] = make(self._workspace, call)
        wrapper.bring_to(batch)
        wrapper.run(query, cache, out)
        if batch.blind is not None:
            out.masked_fill_(batch.blind, 0)

    def make_fixed_plan(self, sizes: PlanSizes) -> FixedPlan | None:
        reason = unserved(sizes.heads, sizes.dtype)
        if reason is None:
            return FlashInferFixedPlan(self._workspace, sizes)
        self._reasons.warn(reason)
        return self._torch.make_fixed_plan(sizes)

    def write(self, cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        if is_appended(*cache.shape[3:]):
            self._appender.append(cache, key, value, slot_mapping)
        elif cache.is_cuda:
            from engine.attention.flashinfer.paged_write import write_paged

            write_paged(cache, key, value, slot_mapping)
        else:
            super().write(cache, key, value, slot_mapping)


class _Appender:
    """Write keys and values by `append_paged_kv_cache`, in a single launch.

    It finds a token's slot by a request, a position and the request's pages. To it the whole cache is one request whose
    pages are in order, so that positions are slots.
    """

    def __init__(self, workspace: wrappers.Workspace) -> None:
        self._append = workspace.flashinfer.append_paged_kv_cache
        self._device = workspace.device
        self._pages: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        # All that there ever were: captured CUDA graphs read those that were the largest at their time.
        self._zeros = [self._integers([0])]

    def append(self, cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Shapes as for `AttentionBackend.write`."""
        if not len(key):
            return  # the launch would have no blocks, which CUDA refuses
        _, num_blocks, block_size, _, _ = cache.shape
        pages = self._pages.get((num_blocks, block_size))
        if pages is None:
            indices = torch.arange(num_blocks, dtype=torch.int32, device=self._device)
            pages = self._pages[num_blocks, block_size] = (
                indices,
                self._integers([0, num_blocks]),
                self._integers([block_size]),
            )
        if len(self._zeros[-1]) < len(key):
            self._zeros.append(torch.zeros(2 * len(key), dtype=torch.int32, device=self._device))
        requests = self._zeros[-1][: len(key)]
        self._append(key, value, requests, slot_mapping.int(), (cache[0], cache[1]), *pages)

    def _integers(self, values: list[int]) -> torch.Tensor:
        [tensor] = send(self._device, np.array(values, np.int32))
        return tensor
