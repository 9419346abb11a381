"""`flashinfer.decode`"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.fake_flashinfer.dense import (
    CUDA_CORE_GROUPS,
    PLAN_BYTES_PER_REQUEST,
    Refused,
    Wrapper,
    check_lens,
    check_pages,
    check_plan,
)


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, backend)
        buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        if use_cuda_graph and any(buffer is None for buffer in buffers):
            raise ValueError("a wrapper for CUDA graphs needs its three buffers")
        self._use_cuda_graph, self._use_tensor_cores = use_cuda_graph, use_tensor_cores
        self._pages = buffers if use_cuda_graph else None

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
    ) -> None:
        check_plan(num_qo_heads, num_kv_heads, head_dim, (q_data_type, kv_data_type))
        check_pages(indptr, indices, last_page_len, page_size)
        check_lens(seq_lens, indptr, last_page_len, page_size)
        if not self._use_tensor_cores and num_qo_heads // num_kv_heads not in CUDA_CORE_GROUPS:
            raise Refused(f"Unsupported group_size: {num_qo_heads // num_kv_heads}")
        if len(last_page_len) * PLAN_BYTES_PER_REQUEST > self.int_workspace_bytes:
            raise Refused("the plan does not fit into the int workspace")
        if self._use_cuda_graph:
            if len(last_page_len) != len(self._pages[2]):
                raise ValueError("The batch size should be fixed in cudagraph mode")
            if len(indices) > len(self._pages[1]):
                raise ValueError("The size of indices should be less than or equal to the allocated buffer")
            for buffer, new in zip(self._pages, (indptr, indices, last_page_len), strict=True):
                buffer[: len(new)].copy_(new)
        else:
            self._pages = tuple(tensor.clone() for tensor in (indptr, indices, last_page_len))
        self._spec = {
            "page": (page_size, num_kv_heads, head_dim),
            "heads": num_qo_heads,
            "dtypes": (q_data_type, kv_data_type),
            "causal": False,
            "window_left": window_left,
            "scale": sm_scale,
        }
        Wrapper.num_plans += 1

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        return self._attend_pages(q, paged_kv_cache, out, range(len(self._pages[2]) + 1))
