"""`flashinfer.prefill`"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.fake_flashinfer.dense import (
    PLAN_BYTES_PER_REQUEST,
    Refused,
    Wrapper,
    check_indptr,
    check_lens,
    check_pages,
    check_plan,
    masks_of,
)


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, backend)
        buffers = (paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        if use_cuda_graph and any(buffer is None for buffer in (qo_indptr_buf, *buffers)):
            raise ValueError("a wrapper for CUDA graphs needs its four buffers")
        self._fixed = (qo_indptr_buf, *buffers) if use_cuda_graph else None
        self._num_rows = 0

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        check_plan(num_qo_heads, num_kv_heads, head_dim_qk, (q_data_type, kv_data_type))
        check_indptr(qo_indptr)
        check_pages(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
        check_lens(seq_lens, paged_kv_indptr, paged_kv_last_page_len, page_size)
        if max_token_per_sequence != int(qo_indptr.diff().max()):
            raise Refused(f"a plan is told the most queries of a request, got {max_token_per_sequence}")
        keys = (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len
        if causal and (qo_indptr.diff() > keys).any():
            raise Refused("the queries of causal attention are the last ones of the keys")
        arrays = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        if self._fixed is None:
            self._pages = tuple(tensor.clone() for tensor in arrays[1:])
        else:
            self._keep(arrays, disable_split_kv)
        self._spec = {
            "page": (page_size, num_kv_heads, head_dim_qk),
            "heads": num_qo_heads,
            "dtypes": (q_data_type, kv_data_type),
            "starts": qo_indptr.tolist(),
            "masks": masks_of(custom_mask, qo_indptr.diff(), keys),
            "causal": causal,
            "window_left": window_left,
            "scale": sm_scale,
        }
        Wrapper.num_plans += 1

    def _keep(self, arrays: tuple[Tensor, ...], disable_split_kv: bool) -> None:
        assert self._fixed is not None
        num_rows, num_requests = int(arrays[0][-1]), len(arrays[3])
        if num_requests != len(self._fixed[3]) or len(arrays[2]) > len(self._fixed[2]):
            raise ValueError("the batch size is fixed, and pages have to fit")
        if num_requests * PLAN_BYTES_PER_REQUEST > self.int_workspace_bytes:
            raise Refused("the plan does not fit into the int workspace")
        if not disable_split_kv:
            raise Refused("partial results of any lengths would not fit into the workspace")
        if self._num_rows and num_rows != self._num_rows:
            raise Refused(f"a graph for {self._num_rows} rows would leave some out, or go on behind {num_rows}")
        self._num_rows, self._pages = num_rows, self._fixed[1:]
        for buffer, new in zip(self._fixed, arrays, strict=True):
            buffer[: len(new)].copy_(new)

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        *args: Any,
        q_scale: float | Tensor | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
    ) -> Tensor:
        return self._attend_pages(q, paged_kv_cache, out, self._spec.get("starts", [0]))


class BatchPrefillWithRaggedKVCacheWrapper(Wrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        kv_indptr_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, backend)
        if use_cuda_graph:
            raise Refused("the fake knows prefills outside of CUDA graphs alone")

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: Tensor | None = None,
        o_indptr: Tensor | None = None,
    ) -> None:
        check_plan(num_qo_heads, num_kv_heads, head_dim_qk, (q_data_type, kv_data_type))
        check_indptr(qo_indptr, kv_indptr)
        if custom_mask is None and self._spec and self._spec["masks"][0] is not None:
            raise Refused("a plan without a mask keeps the mask of the plan before")
        self._spec = {
            "starts": (qo_indptr.tolist(), kv_indptr.tolist()),
            "masks": masks_of(custom_mask, qo_indptr.diff(), kv_indptr.diff()),
            "heads": (num_qo_heads, num_kv_heads, head_dim_qk),
            "dtypes": (q_data_type, kv_data_type),
            "causal": causal,
            "window_left": window_left,
            "scale": sm_scale,
        }
        Wrapper.num_plans += 1

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        o_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        self._check_planned((q.dtype, k.dtype), (q.shape[1], k.shape[1], q.shape[2]))
        query_starts, key_starts = self._spec["starts"]
        if any(x.stride(2) != 1 for x in (q, k, v)):
            raise Refused("the elements of a head lie together")
        if len(k) != key_starts[-1]:
            raise ValueError(f"k.shape[0] ({len(k)}) does not match kv_indptr[-1] ({key_starts[-1]})")
        sides = zip(*(side.split(torch.tensor(key_starts).diff().tolist()) for side in (k, v)), strict=True)
        return self._attend(q, out, query_starts, sides)
