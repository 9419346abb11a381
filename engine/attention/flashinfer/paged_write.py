"""Write keys and values by a Triton kernel, for head sizes unknown to FlashInfer's append."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.attention.backend import dense_rows


def write_paged(cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Put key and value, [num_tokens, num_kv_heads, head_dim], into slots [num_tokens] of a layer's cache,
    [2, num_blocks, block_size, num_kv_heads, head_dim], in one launch."""
    num_tokens, slot_size = len(key), key[0].numel() if len(key) else 0
    if num_tokens == 0:
        return
    key, value = dense_rows(key), dense_rows(value)
    grid = (num_tokens, 2)
    _write_slots[grid](
        cache,
        key,
        value,
        slot_mapping,
        cache.stride(0),
        key.stride(0),
        value.stride(0),
        slot_size,
        SIZE=triton.next_power_of_2(slot_size),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _write_slots(  # type: ignore[no-untyped-def]  # Triton reads annotations, and takes none but its own
    cache, key, value, slot_mapping, side_stride, key_stride, value_stride, slot_size, SIZE: tl.constexpr
):
    """Copy `slot_size` contiguous elements, in one program per token and side."""
    token, side = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    offsets = tl.arange(0, SIZE)
    inside = offsets < slot_size
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if side == 0:
        row = tl.load(key + token * key_stride + offsets, mask=inside)
    else:
        row = tl.load(value + token * value_stride + offsets, mask=inside)
    tl.store(cache + side * side_stride + slot * slot_size + offsets, row, mask=inside)
