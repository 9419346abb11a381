"""The way of small arrays and tensors between the host and the device, without waiting for the device.

    host array ──copy──▶ pinned buffer ──DMA, in the order of the stream──▶ device

A copy from ordinary (pageable) memory makes the host wait until the stream has come so far. A copy from pinned memory
does not, but the buffer must not be written again before the copy is done. PyTorch's caching host allocator sees to
that: an event is recorded behind each copy out of a pinned buffer, and a buffer given back is lent again only once its
events are done. In steady decoding the same few buffers are used in turn.

On a CPU, tensors share the memory of the arrays: nothing is copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array: TypeAlias = npt.NDArray[Any]

ALIGNMENT: Final = 16
"""Bytes. Where each array begins in the buffer that several are sent in."""


def send(device: torch.device, *arrays: Array) -> list[Tensor]:
    """Send arrays to `device` as tensors, in a single transfer. On a CPU arrays stay in place."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    packed = pack(arrays, pin=True).to(device, non_blocking=True)
    return list(unpack(packed, arrays))


def pack(arrays: Sequence[Array], *, pin: bool) -> Tensor:
    """Pack the bytes of all arrays into a host buffer, uint8, each at a multiple of ALIGNMENT."""
    *starts, size = _starts(arrays)
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
    flat = buffer.numpy()
    for array, start in zip(arrays, starts, strict=True):
        flat[start : start + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
    return buffer


def unpack(buffer: Tensor, arrays: Sequence[Array]) -> Iterator[Tensor]:
    """Return views of a copy of a packed buffer, with the arrays' dtypes and shapes."""
    for array, (start, _) in zip(arrays, pairwise(_starts(arrays)), strict=True):
        dtype = torch.from_numpy(array[:0]).dtype
        yield buffer[start : start + array.nbytes].view(dtype).view(array.shape)


def send_tensor(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a tensor in `dtype` on `device`; the same tensor if no change is needed."""
    if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    return tensor.to(device, non_blocking=True).to(dtype)


def select_rows(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Return a copy of the rows with the given numbers, in order.

    An index that is a list would be copied to the device from pageable memory, which the host waits for.
    """
    [index] = send(tensor.device, np.array(rows, np.int64))
    return tensor.index_select(0, index)


def _starts(arrays: Sequence[Array]) -> list[int]:
    """Return the beginning of each array, in bytes, and the end of the last."""
    return list(accumulate((math.ceil(array.nbytes / ALIGNMENT) * ALIGNMENT for array in arrays), initial=0))
