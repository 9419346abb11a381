"""Memory of a step's arrays, on the host and on the device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.state.spec import IntArray


class Staging:
    """Room for int64 arrays of a step, made at start: taken piece by piece on the host, sent in one transfer.

    On CUDA two pinned buffers are used in turn: while one is copied the next step is written into the other. On a CPU
    tensors share the memory of the arrays.
    """

    def __init__(self, device: torch.device, num_values: int) -> None:
        on_cuda = device.type == "cuda"
        hosts = [torch.zeros(num_values, dtype=torch.int64, pin_memory=on_cuda) for _ in range(2 if on_cuda else 1)]
        self._hosts: list[tuple[Tensor, IntArray]] = [(host, host.numpy()) for host in hosts]
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

    def take(self, *shape: int) -> IntArray:
        """Return an array of the step, of any values."""
        first, self._used = self._used, self._used + math.prod(shape)
        return self._hosts[0][1][first : self._used].reshape(shape)

    def send(self, *arrays: IntArray) -> list[Tensor]:
        """Return arrays taken in this step as tensors on the device, at the places of earlier steps."""
        host, flat = self._hosts[0]
        starts = [(array.ctypes.data - flat.ctypes.data) // flat.itemsize for array in arrays]
        if host is not self._target:
            sent = slice(min(starts), max(start + array.size for start, array in zip(starts, arrays, strict=True)))
            self._target[sent].copy_(host[sent], non_blocking=True)
            self._copied[0] = torch.cuda.current_stream(self._target.device).record_event()
        places = zip(starts, arrays, strict=True)
        return [self._target[start : start + array.size].view(array.shape) for start, array in places]
