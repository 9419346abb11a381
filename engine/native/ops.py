"""The kernels as functions of tensors, unused before `enable`: PyTorch computes the same until then.

Callers ask `serves` first: the tensors must be bfloat16, on a CPU, with rows that are contiguous. Linear layers of few
rows, and attention over a paged cache, compute float32 as well.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Final

import torch
from torch import Tensor

from engine.native.build import cpu_flags, load_kernels

MAX_LINEAR_ROWS: Final = 192
"""From about here on PyTorch's matrix product, which packs its operands, is as fast, unless it is slow."""
MAX_FLOAT32_ROWS: Final = 8
"""The same for float32, whose rows are multiplied as they are."""

_PYTORCH_NEEDS: Final = frozenset({"avx512bw", "avx512vl", "avx512dq"})
"""Of a processor for products and convolutions of bfloat16 by oneDNN (PyTorch's `mkldnn_bf16_device_check`)."""
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_STRIDES = _INT * 3
_ATTENTION: Final = [*[_POINTER, _INT] * 3, *[_POINTER] * 3, _INT, _POINTER, *[_INT] * 5]
_LINEAR: Final = [_POINTER, _INT, *[_POINTER] * 3, *[_INT] * 3]
_SIGNATURES: Final = {
    "linear_bf16": _LINEAR,
    "linear_f32": _LINEAR,
    "paged_attention_bf16": [*_ATTENTION, _FLOAT],
    "paged_attention_f32": [*_ATTENTION, _FLOAT],
    "dense_attention_bf16": [*[_POINTER, _STRIDES] * 3, _POINTER, *[_INT] * 6, _FLOAT],
    "take_rows": [_POINTER, _INT, _POINTER, _POINTER, _POINTER, _INT, _INT],
    "write_cache": [_POINTER, _INT, _POINTER, _INT, _POINTER, _INT, _POINTER, _INT, _INT],
    "add_rms_norm": [_POINTER, _POINTER, _POINTER, _POINTER, _INT, _INT, _FLOAT],
    "silu_mul": [_POINTER, _POINTER, _INT, _INT],
    "rotate_by_bf16": [_POINTER, _INT, _POINTER, _POINTER, _INT, _INT, _INT],
    "rotate_by_f32": [_POINTER, _INT, _POINTER, _POINTER, _INT, _INT, _INT],
}

has_pairs = True
"""Whether the kernels multiply pairs of bfloat16 by an instruction, as `enable` learns."""
pytorch_is_slow = False
"""Whether PyTorch multiplies bfloat16 element by element, as `enable` learns: up to ten times as long as float32."""
_enabled = False
_library: ctypes.CDLL


def enable() -> None:
    """Load the kernels and use them from now on. Raises KernelsUnavailableError."""
    global _enabled, _library, has_pairs, pytorch_is_slow
    _library = load_kernels()
    for name, arguments in _SIGNATURES.items():
        function = getattr(_library, name)
        function.argtypes, function.restype = arguments, None
    _library.has_pairs.restype = ctypes.c_bool
    has_pairs, pytorch_is_slow, _enabled = _library.has_pairs(), not cpu_flags() >= _PYTORCH_NEEDS, True


def is_enabled() -> bool:
    return _enabled


def serves(x: Tensor) -> bool:
    return _enabled and x.dtype == torch.bfloat16 and x.device.type == "cpu" and x.stride(-1) == 1


def serves_linear(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear` takes these, and is the faster one."""
    many = sys.maxsize if pytorch_is_slow else MAX_LINEAR_ROWS
    most = MAX_FLOAT32_ROWS if x.dtype == torch.float32 else many
    return (
        _enabled
        and x.device.type == "cpu"
        and x.dtype == weight.dtype
        and x.dtype in (torch.bfloat16, torch.float32)
        and (x.stride(-1) == 1 if x.ndim == 2 else x.ndim > 2 and x.is_contiguous())
        and x.numel() <= most * x.shape[-1]
        and weight.shape[0] >= 8
        and weight.shape[1] == x.shape[-1]
        and x.shape[-1] % 4 == 0
        and weight.is_contiguous()
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [m, k] or contiguous [..., k], weight [n, k] with n at least 8 and k a multiple of 4 -> [..., n]"""
    columns, size = weight.shape
    out = x.new_empty(*x.shape[:-1], columns)
    stride, rows = x.stride(0) if x.ndim == 2 else size, x.numel() // size
    offsets = None if bias is None else bias.data_ptr()
    multiply = _library.linear_bf16 if x.dtype == torch.bfloat16 else _library.linear_f32
    multiply(x.data_ptr(), stride, weight.data_ptr(), offsets, out.data_ptr(), rows, columns, size)
    return out


def serves_rows(x: Tensor) -> bool:
    """Whether the kernels for norms and activations take these rows."""
    return serves(x) and x.is_contiguous()


def add_rms_norm(hidden: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Adds `added` to hidden, [..., size], in place and returns the norm of the sum. Both must be contiguous."""
    out, size = torch.empty_like(hidden), hidden.shape[-1]
    other = None if added is None else added.data_ptr()
    rows = hidden.numel() // size
    _library.add_rms_norm(hidden.data_ptr(), other, weight.data_ptr(), out.data_ptr(), rows, size, eps)
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """Contiguous [m, 2 * n] -> [m, n], silu of the first half times the second."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    _library.silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, size)
    return out


def serves_rotation(x: Tensor) -> bool:
    return x.shape[-1] % 2 == 0 and serves(x) and x.stride(1) == x.shape[-1]


def rotate(x: Tensor, cosines: Tensor, signed_sines: Tensor) -> None:
    """x [n, heads, head_dim] in place; cosines and sines contiguous [n, 1, head_dim], bfloat16 or float32."""
    num_tokens, num_heads, head_dim = x.shape
    tables = cosines.data_ptr(), signed_sines.data_ptr()
    rotated = _library.rotate_by_bf16 if cosines.dtype == torch.bfloat16 else _library.rotate_by_f32
    rotated(x.data_ptr(), x.stride(0), *tables, num_tokens, num_heads, head_dim)


def take_rows(x: Tensor, rows: Tensor, num_rows: Tensor) -> Tensor:
    """Copy rows `rows` [n] of x [n, ...], dense within a row, to the first num_rows [1] rows of the output, as x.

    Recorded, norms, activations and linear layers behind this compute these alone, and the rest is anything.
    """
    out, scale = torch.empty(x.shape, dtype=x.dtype), x.element_size() // 2  # the kernel copies units of two bytes
    places = rows.data_ptr(), num_rows.data_ptr(), out.data_ptr()
    _library.take_rows(x.data_ptr(), x.stride(0) * scale, *places, len(x), x[0].numel() * scale)
    return out


def write_cache(cache: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """key and value [n, num_kv_heads, head_dim] into slots [n] (int64) of a cache of any dtype.

    Heads must be contiguous within a token.
    """
    scale = cache.element_size() // 2  # the kernel copies units of two bytes
    width = key.shape[1] * key.shape[2] * scale
    strides = key.stride(0) * scale, value.stride(0) * scale
    rows = key.data_ptr(), strides[0], value.data_ptr(), strides[1]
    _library.write_cache(*rows, cache.data_ptr(), cache.stride(0) * scale, slots.data_ptr(), len(key), width)


def paged_attention(
    query: Tensor,
    cache: Tensor,
    tables: Tensor,
    requests: Tensor,
    key_ranges: Tensor,
    scale: float,
    bias: Tensor | None,
) -> Tensor:
    """Attend with token t to keys key_ranges[t, 0] .. [t, 1] of its request; zeros for an empty range.

    query [n, num_heads, head_dim], heads contiguous within a token, float32 or bfloat16 as the cache; tables
    [num_requests, m], requests [n] (a row of `tables` for each token) and key_ranges [n, 2] contiguous int64; bias None
    or contiguous float32 [num_heads, n, max_len] -> as query.
    """
    out = torch.empty(query.shape, dtype=query.dtype)
    num_tokens, num_heads, head_dim = query.shape
    attend = _library.paged_attention_bf16 if query.dtype == torch.bfloat16 else _library.paged_attention_f32
    keys = cache.data_ptr(), cache.stride(0), tables.data_ptr(), tables.stride(0)
    addends = (None, 0) if bias is None else (bias.data_ptr(), bias.shape[-1])
    sizes = num_tokens, num_heads, cache.shape[3], head_dim, cache.shape[2]
    tokens = requests.data_ptr(), key_ranges.data_ptr()
    attend(query.data_ptr(), query.stride(0), *keys, *tokens, *addends, out.data_ptr(), *sizes, scale)
    return out


def serves_dense(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `dense_attention` takes these, and is the faster one: six queries or more and at least as many keys, an
    even head_dim."""
    return (
        has_pairs
        and key.shape[2] >= query.shape[2] >= 6
        and query.shape[3] % 2 == 0
        and key.shape == value.shape
        and all(map(serves, (query, key, value)))
    )


def dense_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attend with many queries to all of many keys.

    query [batch, num_heads, num_queries, head_dim], key and value [batch, num_kv_heads, num_keys, head_dim]
    -> [batch, num_queries, num_heads, head_dim].
    """
    batch, num_heads, num_queries, head_dim = query.shape
    num_kv_heads, num_keys = key.shape[1:3]
    out = query.new_empty(batch, num_queries, num_heads, head_dim)
    inputs = [part for x in (query, key, value) for part in (x.data_ptr(), _STRIDES(*x.stride()[:3]))]
    sizes = batch, num_heads, num_kv_heads, num_queries, num_keys, head_dim
    _library.dense_attention_bf16(*inputs, out.data_ptr(), *sizes, scale)
    return out
