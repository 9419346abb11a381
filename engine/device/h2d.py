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


def overwrite(target: Tensor, array: Array) -> None:
    """Write an array into a tensor of equal shape and dtype at a fixed address, in stream order."""
    if target.device.type == "cpu":
        target.copy_(torch.from_numpy(array))
        return
    buffer = torch.empty(target.shape, dtype=target.dtype, pin_memory=True)
    buffer.numpy()[...] = array
    target.copy_(buffer, non_blocking=True)


class Staging:
    """Room for int64 arrays of a step, made at start: taken piece by piece on the host, sent in one transfer.

    On CUDA two pinned buffers are used in turn: while one is copied the next step is written into the other. On a CPU
    tensors share the memory of the arrays.
    """

    def __init__(self, device: torch.device, num_values: int) -> None:
        on_cuda = device.type == "cuda"
        hosts = [torch.zeros(num_values, dtype=torch.int64, pin_memory=on_cuda) for _ in range(2 if on_cuda else 1)]
        self._hosts: list[tuple[Tensor, Array]] = [(host, host.numpy()) for host in hosts]
        self._copied: list[torch.cuda.Event | None] = [None] * len(hosts)
        self._target = torch.zeros(num_values, dtype=torch.int64, device=device) if on_cuda else hosts[0]
        self._used = 0

    def begin(self) -> None:
        """Give up the arrays of the step before the last; waits for their copy, done long ago."""
        self._hosts.append(self._hosts.pop(0))
        self._copied.append(self._copied.pop(0))
        self._used = 0
        if self._copied[0] is not None:
            self._copied[0].synchronize()

    def take(self, *shape: int) -> Array:
        """Return an array of the step, of any values."""
        first, self._used = self._used, self._used + math.prod(shape)
        return self._hosts[0][1][first : self._used].reshape(shape)

    def send(self, *arrays: Array) -> list[Tensor]:
        """Return arrays taken in this step as tensors on the device, at the places of earlier steps."""
        host, flat = self._hosts[0]
        starts = [(array.ctypes.data - flat.ctypes.data) // flat.itemsize for array in arrays]
        if host is not self._target:
            sent = slice(min(starts), max(start + array.size for start, array in zip(starts, arrays, strict=True)))
            self._target[sent].copy_(host[sent], non_blocking=True)
            self._copied[0] = torch.cuda.current_stream(self._target.device).record_event()
        places = zip(starts, arrays, strict=True)
        return [self._target[start : start + array.size].view(array.shape) for start, array in places]


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


def fetch(tensor: Tensor) -> Tensor:
    """Return a tensor's values on the CPU. Waits for their computation, not for work queued later."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).record_event().synchronize()
    return host


def _starts(arrays: Sequence[Array]) -> list[int]:
    """Return the beginning of each array, in bytes, and the end of the last."""
    return list(accumulate((math.ceil(array.nbytes / ALIGNMENT) * ALIGNMENT for array in arrays), initial=0))
