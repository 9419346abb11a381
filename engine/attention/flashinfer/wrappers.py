"""FlashInfer's wrappers (Ye et al., 2025), each with the batch of its plan.

A wrapper is planned on the host for one batch, and then runs for every layer. Planning writes into a pinned buffer of
the wrapper's own, copied to the device in the order of the stream. An event behind each plan keeps the next plan from
overwriting a buffer that is not copied yet. By then the step before has been launched, and this copy stands at its
beginning, so that nobody waits for long for it.

What we give a plan is pinned, and so are lengths that it would work out itself. One thing is FlashInfer's own: a plan
of decodes outside of CUDA graphs copies 0, 1, 2 … from pageable memory, which may wait for the stream and with it for
the step before.

Decodes under a mask are planned as prefills: the wrapper of decodes knows none. A kernel packs the bits of a mask, and
reads lengths on the device: such a plan waits for it.

FA2 is asked for everywhere: what `auto` takes on Hopper is a second set of kernels that differs from it in rounding,
and does not serve paged prefills without a causal mask.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from engine.attention.flashinfer.paged_batch import PagedBatch, Pages, Phase, RaggedBatch
from engine.attention.flashinfer.served import needs_tensor_cores
from engine.state.spec import HeadSpec

CPU: Final = torch.device("cpu")
WORKSPACE_BYTES: Final = 384 * 2**20
"""For partial results of long sequences that are computed in parts: what others give FlashInfer, too."""
RAGGED_WORKSPACE_BYTES: Final = 2**20
"""Encoders' sequences are computed in one piece each."""
FIXED_PLAN_BYTES: Final = 2**20
"""For a graph's plan, instead of 8 MiB: a few thousand pieces of work, 17 bytes each."""
LAYOUT: Final = "NHD"
KERNELS: Final = "fa2"
_CTAS_PER_SM: Final = 2
_TILE_ROWS: Final = 16
"""Of how FA2 divides the work of decodes on tensor cores: query heads are packed into tiles of so many rows."""


def load_flashinfer() -> Any:
    """Import FlashInfer. Raises ImportError if the package or a dependency is missing."""
    return importlib.import_module("flashinfer")


class Workspace:
    """Shared state of a process's wrappers: FlashInfer, the device, and memory for partial results.

    They run one after the other, in the order of one stream, so that one buffer is enough.
    """

    def __init__(self, flashinfer: Any, device: torch.device, size_bytes: int) -> None:
        self.flashinfer, self.device = flashinfer, device
        self.buffer = torch.zeros(size_bytes, dtype=torch.uint8, device=device)


@dataclass(frozen=True)
class Call:
    """Parameters of a plan over pages, beside the batch. `scale` None is 1 / sqrt(head_dim); `window` counts the
    query's own key."""

    phase: Phase
    causal: bool
    heads: HeadSpec
    block_size: int
    dtype: torch.dtype
    scale: float | None
    window: int | None
    masked: bool = False


def fixed_decode_bytes(num_requests: int, heads: HeadSpec, device: torch.device) -> int:
    """Return the most workspace bytes that a graph's decode plan takes for partial results: what `PrefillPlan` in
    FlashInfer's scheduler.cuh counts, or more; with 0.7.4 nothing is taken for more requests than are divided. Plans on
    vector units need some MiB at most."""
    if not needs_tensor_cores(heads.num_heads, heads.num_kv_heads):
        return 0
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    group = heads.num_heads // heads.num_kv_heads
    num_tiles = -(-num_requests * group // _TILE_ROWS) + num_requests - 1
    num_pieces = max(_CTAS_PER_SM * num_sms // heads.num_kv_heads, num_tiles)
    return heads.num_heads * num_pieces * _TILE_ROWS * (heads.head_dim + 1) * torch.float32.itemsize


class _Planned(ABC):
    """A wrapper, planned for `batch`, and anew for each other one."""

    def __init__(self, workspace: Workspace, call: Call | RaggedCall, wrapper: Any) -> None:
        self._device, self._call, self._wrapper = workspace.device, call, wrapper
        self.batch: object = None
        self._copied: torch.cuda.Event | None = None

    def bring_to(self, batch: object) -> None:
        """Plan for a batch unless the last plan was for the same batch.

        Raises RuntimeError while a CUDA graph is captured, which cannot hold the host's part of a plan.
        """
        if self.batch is batch:
            return
        on_cuda = self._device.type == "cuda"
        if on_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("FlashInfer is planned outside of a CUDA graph: run the step once before capturing it")
        if self._copied is not None:
            self._copied.synchronize()
        self._plan(batch)
        self.batch = batch
        if on_cuda:
            self._copied = torch.cuda.current_stream(self._device).record_event()

    @abstractmethod
    def _plan(self, batch: Any) -> None: ...

    def _plan_call(self, *layout: torch.Tensor, **more: Any) -> None:
        """Plan for the heads, dtype and scale of the call; FlashInfer names the head size in two ways."""
        heads, dtype, scale = self._call.heads, self._call.dtype, self._call.scale
        sizes = heads.num_heads, heads.num_kv_heads, heads.head_dim
        self._wrapper.plan(*layout, *sizes, sm_scale=scale, q_data_type=dtype, kv_data_type=dtype, **more)


class PagedWrapper(_Planned):
    """A wrapper over the pages of a cache, planned for a single kind of call. With `fixed` buffers, CUDA graphs can
    capture the wrapper: of query starts, indptr, indices and last_page_len, as of `Pages`.

    Requests are computed in one piece (`disable_split_kv`) where the partial results of a graph would not fit into the
    workspace: of decodes of a large batch, and of prompts, which may have any lengths.
    """

    _call: Call

    def __init__(self, workspace: Workspace, call: Call, wrapper: Any, fixed: Sequence[torch.Tensor]) -> None:
        super().__init__(workspace, call, wrapper)
        self._in_one_piece = False
        if fixed:
            needed = fixed_decode_bytes(len(fixed[-1]), call.heads, self._device)
            self._in_one_piece = call.phase == "prefill" or needed > workspace.buffer.numel()
            small = torch.empty(FIXED_PLAN_BYTES, dtype=torch.uint8, device=self._device)
            wrapper.reset_workspace_buffer(workspace.buffer, small)

    def run(self, query: torch.Tensor, cache: torch.Tensor, out: torch.Tensor) -> None:
        """query and out [num_tokens, num_heads, head_dim], cache as backends have it."""
        self._wrapper.run(query, (cache[0], cache[1]), out=out)

    def _plan_pages(self, pages: Pages, *layout: torch.Tensor, **more: Any) -> None:
        self._plan_call(
            *layout,
            page_size=self._call.block_size,
            window_left=(self._call.window or 0) - 1,
            seq_lens=pages.num_keys,
            disable_split_kv=self._in_one_piece,
            **more,
        )


class DecodeWrapper(PagedWrapper):
    """A query token per request."""

    def __init__(self, workspace: Workspace, call: Call, fixed: Sequence[torch.Tensor] = ()) -> None:
        on_tensor_cores = needs_tensor_cores(call.heads.num_heads, call.heads.num_kv_heads)
        wrapper = workspace.flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace.buffer, LAYOUT, bool(fixed), on_tensor_cores, *fixed[1:], backend=KERNELS
        )
        super().__init__(workspace, call, wrapper, fixed)

    def _plan(self, batch: PagedBatch) -> None:
        pages = batch.pages
        self._plan_pages(pages, pages.indptr, pages.indices, pages.last_page_len)


class PrefillWrapper(PagedWrapper):
    """Any number of query tokens per request: the last tokens of the keys, if causal."""

    def __init__(self, workspace: Workspace, call: Call, fixed: Sequence[torch.Tensor] = ()) -> None:
        wrapper = workspace.flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace.buffer, LAYOUT, bool(fixed), *fixed, backend=KERNELS
        )
        super().__init__(workspace, call, wrapper, fixed)

    def _plan(self, batch: PagedBatch) -> None:
        pages, place = batch.pages, CPU if batch.mask is None else self._device
        self._plan_pages(
            pages,
            batch.query_starts.to(place, non_blocking=True),
            pages.indptr.to(place, non_blocking=True),
            pages.indices,
            pages.last_page_len.to(place, non_blocking=True),
            causal=self._call.causal,
            max_token_per_sequence=batch.max_queries,
            custom_mask=batch.mask,
        )


@dataclass(frozen=True)
class RaggedCall:
    """Parameters of a plan over sequences laid end to end, beside their lengths."""

    heads: HeadSpec
    dtype: torch.dtype
    scale: float | None
    masked: bool = False


class RaggedWrapper(_Planned):
    """Attention within sequences laid end to end, in both directions.

    None is computed in parts, so that an output does not depend on what else is in the batch.
    """

    def __init__(self, workspace: Workspace, call: RaggedCall) -> None:
        make = workspace.flashinfer.BatchPrefillWithRaggedKVCacheWrapper
        super().__init__(workspace, call, make(workspace.buffer, LAYOUT, backend=KERNELS))

    def run(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query [num_tokens, num_heads, head_dim], key and value [num_tokens, num_kv_heads, head_dim] -> as query."""
        attended: torch.Tensor = self._wrapper.run(query, key, value)
        return attended

    def _plan(self, batch: RaggedBatch) -> None:
        starts = batch.starts if batch.mask is None else batch.starts.to(self._device)
        self._plan_call(starts, starts, causal=False, disable_split_kv=True, custom_mask=batch.mask)
