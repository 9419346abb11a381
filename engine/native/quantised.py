"""Linear layers with small codes for weights, as a function of tensors on a CPU."""

from __future__ import annotations

import ctypes
import functools
from typing import Final

import torch
from torch import Tensor

from common.telemetry import get_logger
from engine.native.build import QUANTISED, KernelsUnavailableError, load_kernels

KINDS: Final = {torch.int8: 0, torch.uint8: 1, torch.float8_e4m3fn: 2}
"""The kernel's numbers of the codes: 8-bit integers, pairs of 4-bit integers, 8-bit floats."""
_FUNCTIONS: Final = {torch.float32: "quantised_linear_f32", torch.bfloat16: "quantised_linear_bf16"}
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
_SIGNATURE: Final = [_INT, _POINTER, _INT, *[_POINTER] * 3, _INT, _INT, _POINTER, _POINTER, *[_INT] * 3]

log = get_logger()


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernels; None, with a warning, where they cannot run."""
    try:
        loaded = load_kernels(QUANTISED)
    except KernelsUnavailableError as error:
        log.warning("quantised weights are multiplied by PyTorch alone, which is slower", reason=str(error))
        return None
    for name in _FUNCTIONS.values():
        function = getattr(loaded, name)
        function.argtypes, function.restype = _SIGNATURE, None
    return loaded


def serves(x: Tensor) -> bool:
    """Whether `linear` takes x: two-dimensional, on a CPU, float32 or bfloat16."""
    return (
        x.device.type == "cpu" and x.ndim == 2 and x.dtype in _FUNCTIONS and x.stride(1) == 1 and library() is not None
    )


def linear(x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, group: int, bias: Tensor | None) -> Tensor:
    """x [m, k] -> [m, n]; codes [n, k], or [n, k / 2] for pairs, with k a multiple of 32.

    scales and zeros float32 [n, groups] of `group` columns each, a multiple of 32 where there are several. Zeros may be
    missing except for pairs. All contiguous but x; bias has the dtype of x.
    """
    (rows, size), columns = x.shape, len(codes)
    out = x.new_empty(rows, columns)
    offsets = None if bias is None else bias.data_ptr()
    groups = scales.data_ptr(), None if zeros is None else zeros.data_ptr(), scales.shape[1], group
    multiply = getattr(library(), _FUNCTIONS[x.dtype])
    inputs = KINDS[codes.dtype], x.data_ptr(), x.stride(0), codes.data_ptr()
    multiply(*inputs, *groups, offsets, out.data_ptr(), rows, columns, size)
    return out
