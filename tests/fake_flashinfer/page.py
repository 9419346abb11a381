"""`flashinfer.page`"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.fake_flashinfer.dense import Refused

APPENDED_HEAD_DIMS = (64, 128, 256, 512)


def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: Tensor | tuple[Tensor, Tensor],
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Token i goes to position `positions[i]` of request `batch_indices[i]`, in that request's pages."""
    integers = (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
    if any(tensor.dtype != torch.int32 for tensor in integers):
        raise Refused("append reads int32; others are converted in every call")
    if append_key.shape[2] not in APPENDED_HEAD_DIMS or kv_layout != "NHD" or isinstance(paged_kv_cache, Tensor):
        raise Refused(f"append is not compiled for heads of {append_key.shape[2]}, or not known to the fake")
    if append_key.shape[1] * append_key.shape[2] // max(8, append_key.shape[2] // 32) > 1024:
        raise Refused("append has a thread for every few elements of all heads, and CUDA no block of so many")
    if not len(append_key) == len(append_value) == len(batch_indices) == len(positions):
        raise Refused("append takes one request and one position for each token")
    if not len(append_key):
        raise Refused("append launches a block for some tokens, and CUDA refuses a launch of none")
    page_size = paged_kv_cache[0].shape[1]
    pages, entries = positions.long() // page_size, positions.long() % page_size
    places = kv_indptr[batch_indices.long()].long() + pages
    if (places >= kv_indptr[batch_indices.long() + 1]).any():
        raise Refused("a position lies behind the last page of its request")
    for side, rows in zip(paged_kv_cache, (append_key, append_value), strict=True):
        side[kv_indices[places].long(), entries] = rows
