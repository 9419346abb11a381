"""What the wrappers compute and what they all refuse."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

DTYPES = frozenset({torch.float16, torch.bfloat16})
HEAD_DIMS = (64, 128, 256)
"""Others compile, and some of them return wrong numbers."""
CUDA_CORE_GROUPS = (1, 2, 3, 4, 8)
INT_WORKSPACE_BYTES = 8 * 1024 * 1024
PLAN_BYTES_PER_REQUEST = 17


class Refused(Exception):
    """What the real package raises, or would answer with wrong numbers."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    window_left: int,
    scale: float | None,
    mask: Tensor | None = None,
) -> Tensor:
    """One request: query [q, num_heads, head_dim], key and value [k, num_kv_heads, head_dim] -> as query.

    With a mask [q * k], False for hidden keys, `causal` says nothing.
    """
    group = query.shape[1] // key.shape[1]
    keys, values = (x.float().repeat_interleave(group, dim=1).transpose(0, 1) for x in (key, value))
    scores = query.float().transpose(0, 1) @ keys.transpose(1, 2) * (scale or 1 / math.sqrt(query.shape[2]))
    positions = torch.arange(len(key) - len(query), len(key))[:, None]
    hidden = torch.zeros(len(query), len(key), dtype=torch.bool) if mask is None else ~mask.view(len(query), len(key))
    if causal and mask is None:
        hidden |= torch.arange(len(key))[None] > positions
    if window_left >= 0:
        hidden |= torch.arange(len(key))[None] < positions - window_left
    attended = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values
    return attended.transpose(0, 1).to(query.dtype)


def check_plan(num_qo_heads: int, num_kv_heads: int, head_dim: int, dtypes: tuple[torch.dtype, ...]) -> None:
    """What a plan asks for in vain."""
    if not DTYPES.issuperset(dtypes):
        raise Refused(f"there are no kernels for {dtypes}")
    if head_dim not in HEAD_DIMS:
        raise Refused(f"a head_dim of {head_dim} is not checked, and computed wrong")
    if num_qo_heads % num_kv_heads:
        raise Refused(f"num_qo_heads {num_qo_heads} is no multiple of num_kv_heads {num_kv_heads}")


def masks_of(custom_mask: Tensor | None, num_queries: Tensor, num_keys: Tensor) -> list[Tensor | None]:
    """The mask of each request. A plan takes it flat, and packs its bits on its device, with the lengths there, too."""
    sizes = (num_queries * num_keys).tolist()
    if custom_mask is None:
        return [None] * len(sizes)
    if custom_mask.dtype != torch.bool or custom_mask.shape != (sum(sizes),) or custom_mask.device != num_keys.device:
        raise Refused(f"a custom mask is bool [{sum(sizes)}], on the device as the lengths, got {custom_mask.shape}")
    return list(custom_mask.split(sizes))


def check_indptr(*tensors: Tensor) -> None:
    """Arrays of a plan: int32, on the host, for the plan itself reads them."""
    for tensor in tensors:
        if tensor.dtype != torch.int32 or tensor.device.type != "cpu":
            raise Refused(f"a plan reads int32 on the host, got {tensor.dtype} on {tensor.device}")


def check_pages(indptr: Tensor, indices: Tensor, last_page_len: Tensor, page_size: int) -> None:
    """A page table in which every request has a page, and something in the last one."""
    check_indptr(indptr, last_page_len)
    if indices.dtype != torch.int32:
        raise Refused(f"page indices are int32, got {indices.dtype}")
    if len(indptr) != len(last_page_len) + 1 or int(indptr[0]) != 0 or int(indptr[-1]) != len(indices):
        raise Refused("the page table does not add up")
    if (indptr.diff() < 1).any() or (last_page_len < 1).any() or (last_page_len > page_size).any():
        raise Refused("every request has at least one page, and the last one holds 1 .. page_size keys")


def check_lens(seq_lens: Tensor | None, indptr: Tensor, last_page_len: Tensor, page_size: int) -> None:
    """Lengths that a plan takes instead of working them out; without them it copies some that are not pinned."""
    expected = (indptr.diff() - 1) * page_size + last_page_len
    if seq_lens is None or seq_lens.dtype != torch.int32 or not torch.equal(seq_lens, expected):
        raise Refused(f"a plan is told the keys of each request, {expected.tolist()}, got {seq_lens}")


def check_cache(cache: tuple[Tensor, Tensor], page_size: int, num_kv_heads: int, head_dim: int) -> None:
    for side in cache:
        if side.shape[1:] != (page_size, num_kv_heads, head_dim):
            raise Refused(f"planned for pages of {(page_size, num_kv_heads, head_dim)}, got {tuple(side.shape[1:])}")


def keys_of(side: Tensor, indptr: Tensor, indices: Tensor, last_page_len: Tensor, request: int) -> Tensor:
    """[num_keys, num_kv_heads, head_dim] of one request."""
    first, last = int(indptr[request]), int(indptr[request + 1])
    pages = side[indices[first:last].long()]
    num_keys = (last - first - 1) * side.shape[1] + int(last_page_len[request])
    return pages.reshape(-1, *side.shape[2:])[:num_keys]


class Wrapper:
    """What the wrappers have in common: workspaces, and how many plans were made by all of them."""

    num_plans = 0

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str, backend: str) -> None:
        if kv_layout != "NHD":
            raise Refused(f"the fake knows the layout NHD alone, got {kv_layout!r}")
        if backend != "fa2":
            raise Refused(f"backend {backend!r} may take FA3, which serves no paged attention without a causal mask")
        if float_workspace_buffer.dtype != torch.uint8 or float_workspace_buffer[:1024].any():
            raise Refused("the workspace is uint8, and zero at first")
        self.int_workspace_bytes = INT_WORKSPACE_BYTES
        self._spec: dict[str, Any] = {}
        self._pages: Any = ()

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        self.int_workspace_bytes = int_workspace_buffer.numel()

    def _check_planned(self, dtypes: tuple[torch.dtype, ...], heads: Any) -> None:
        if not self._spec:
            raise Refused("run comes after plan")
        if dtypes != self._spec["dtypes"] or heads != self._spec["heads"]:
            raise Refused(f"planned for {self._spec}, got {dtypes} and heads {heads}")

    def _attend_pages(self, q: Tensor, cache: Any, out: Tensor | None, starts: Sequence[int]) -> Tensor:
        """Queries from each of `starts` to the next, over the pages of one request."""
        assert isinstance(cache, tuple)
        self._check_planned((q.dtype, cache[0].dtype), q.shape[1])
        check_cache(cache, *self._spec["page"])
        sides = ([keys_of(side, *self._pages, request) for side in cache] for request in range(len(starts) - 1))
        return self._attend(q, out, starts, sides)

    def _attend(
        self, q: Tensor, out: Tensor | None, starts: Sequence[int], sides: Iterable[Sequence[Tensor]]
    ) -> Tensor:
        """As `attend`, for queries from each of `starts` to the next and `sides`, the keys and values of each."""
        if len(q) != starts[-1]:
            raise ValueError(f"q.shape[0] ({len(q)}) does not match qo_indptr[-1] ({starts[-1]})")
        out = torch.empty(q.shape, dtype=q.dtype) if out is None else out
        planned = {name: self._spec[name] for name in ("causal", "window_left", "scale")}
        masks = self._spec.get("masks") or [None] * (len(starts) - 1)
        for first, last, (key, value), mask in zip(starts[:-1], starts[1:], sides, masks, strict=True):
            out[first:last] = attend(q[first:last], key, value, **planned, mask=mask)
        return out
