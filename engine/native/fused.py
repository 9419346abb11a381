"""Small kernels of a decoder layer on CUDA, by Triton: two or three launches of PyTorch in a single launch.

A decode step reads a weight matrix in tens of microseconds, and a launch that moves a few kilobytes takes two. With
sixteen such launches a layer, a small model would spend a third of its time on them. Everything is computed in float32
and rounded where PyTorch's composition in the dtype of the rows rounds. Triton comes with PyTorch for CUDA; there is
nothing to build ahead.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES: Final = frozenset({torch.bfloat16, torch.float16, torch.float32})
COLUMNS_PER_WARP: Final = 256
"""Eight elements for each thread, which is as much as it loads at once in half precision."""
MAX_WARPS: Final = 8
GATED_COLUMNS: Final = 1024
ROTATED_HEADS: Final = 16
"""Columns or heads of a token that one program computes."""


def serves_rows(x: Tensor) -> bool:
    """Return whether the kernels for norms and activations take rows, or, for norms, heads of wider rows."""
    return x.dtype in DTYPES and x.stride(-1) == 1 and (x.ndim == 3 or x.is_contiguous())


def add_rms_norm(hidden: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Adds `added` to hidden, [..., size], in place and returns the norm of the sum.

    Both are contiguous; without `added`, hidden may be heads of wider rows, [n, heads, size].
    """
    out, size = hidden.new_empty(hidden.shape), hidden.shape[-1]
    num_rows = hidden.numel() // size if size else 0
    if num_rows == 0:
        return out
    if hidden.is_contiguous():
        rows_together, outer_stride, inner_stride = 1, size, 0
    else:
        _, rows_together, _ = hidden.shape
        outer_stride, inner_stride, _ = hidden.stride()
    _add_rms_norm[(num_rows,)](
        hidden,
        hidden if added is None else added,
        weight,
        out,
        size,
        rows_together,
        outer_stride,
        inner_stride,
        eps,
        HAS_ADDED=added is not None,
        SIZE=triton.next_power_of_2(size),
        num_warps=_warps(triton.next_power_of_2(size)),
    )
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """[m, 2 * n] -> [m, n], silu of the first half times the second."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, size)
    if out.numel():
        grid = (num_rows, triton.cdiv(size, GATED_COLUMNS))
        _silu_mul[grid](gate_up, out, gate_up.stride(0), size, SIZE=GATED_COLUMNS, num_warps=_warps(GATED_COLUMNS))
    return out


def serves_rotation(x: Tensor) -> bool:
    return x.dtype in DTYPES and x.stride(-1) == 1


def rotate(x: Tensor, cosines: Tensor, signed_sines: Tensor) -> None:
    """x [n, heads, head_dim] in place, heads being rows of a wider tensor or not; cosines and sines contiguous
    [n, 1, head_dim], the sines of the first half with a minus."""
    num_tokens, num_heads, head_dim = x.shape
    if x.numel() == 0:
        return
    half = head_dim // 2
    heads = min(ROTATED_HEADS, triton.next_power_of_2(num_heads))
    _rotate[(num_tokens, triton.cdiv(num_heads, heads))](
        x,
        cosines,
        signed_sines,
        x.stride(0),
        x.stride(1),
        num_heads,
        half,
        HEADS=heads,
        HALF=triton.next_power_of_2(half),
        num_warps=_warps(heads * triton.next_power_of_2(half)),
    )


def _warps(num_elements: int) -> int:
    """Return the warps of a program; both numbers are powers of two."""
    return min(max(num_elements // COLUMNS_PER_WARP, 1), MAX_WARPS)


@triton.jit  # type: ignore[untyped-decorator]
def _add_rms_norm(  # type: ignore[no-untyped-def]  # Triton reads annotations, and takes none but its own
    hidden,
    added,
    weight,
    out,
    size,
    rows_together,
    outer_stride,
    inner_stride,
    eps,
    HAS_ADDED: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Run a program per row. `rows_together` rows are `inner_stride` apart, groups `outer_stride`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, SIZE)
    inside = columns < size
    place = hidden + row // rows_together * outer_stride + row % rows_together * inner_stride + columns
    x = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if HAS_ADDED:
        x += tl.load(added + row * size + columns, mask=inside, other=0.0).to(tl.float32)
        total = x.to(hidden.dtype.element_ty)
        tl.store(place, total, mask=inside)
        x = total.to(tl.float32)  # the norm is that of the sum as it is kept
    scale = 1 / tl.sqrt(tl.sum(x * x, axis=0) / size + eps)
    normed = x * scale * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + columns, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _silu_mul(gate_up, out, row_stride, size, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Run a program for SIZE columns of a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = columns < size
    gate = tl.load(gate_up + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + size + columns, mask=inside, other=0.0).to(tl.float32)
    activated = (gate / (1 + tl.exp(-gate))).to(out.dtype.element_ty)
    tl.store(out + row * size + columns, (activated.to(tl.float32) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def]
    x,
    cosines,
    signed_sines,
    token_stride,
    head_stride,
    num_heads,
    half,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Run a program for HEADS heads of a token.

    x       first half · second half  ->  first * cos + second * sin · second * cos' + first * sin'
    tables  cos · cos', sin · sin'
    """
    token = tl.program_id(0).to(tl.int64)
    heads, columns = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, HALF)
    inside = columns < half
    table = token * (2 * half) + columns
    cos_first = tl.load(cosines + table, mask=inside, other=0.0).to(tl.float32)[None]
    cos_second = tl.load(cosines + table + half, mask=inside, other=0.0).to(tl.float32)[None]
    sin_first = tl.load(signed_sines + table, mask=inside, other=0.0).to(tl.float32)[None]
    sin_second = tl.load(signed_sines + table + half, mask=inside, other=0.0).to(tl.float32)[None]
    place = x + token * token_stride + heads[:, None] * head_stride + columns[None]
    inside_both = (heads < num_heads)[:, None] & inside[None]
    first = tl.load(place, mask=inside_both, other=0.0).to(tl.float32)
    second = tl.load(place + half, mask=inside_both, other=0.0).to(tl.float32)
    dtype: tl.constexpr = x.dtype.element_ty
    new_first = (first * cos_first).to(dtype).to(tl.float32) + second * sin_first
    new_second = (second * cos_second).to(dtype).to(tl.float32) + first * sin_second
    tl.store(place, new_first.to(dtype), mask=inside_both)
    tl.store(place + half, new_second.to(dtype), mask=inside_both)
