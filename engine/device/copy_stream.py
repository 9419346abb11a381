"""Copies from a GPU to pinned memory of the host on a stream of their own, beside the one that computes.

    computing   ██ step N ██ gather ██ step N+1 ██████
    copying                         └▶ to the host ▒▒▒

The thread that launches steps does not wait for the device; whoever wants a copy does. What comes from other workers is
on the device before the engine hears of it (services.handoff.device_tensors).
On a CPU everything is where it is wanted.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import torch
from torch import Tensor

MAX_LEAVING: Final = 8
"""Tensors on their way to the host at once: those that wait for steps to end hold memory of the device."""


class AsyncCopy:
    """A tensor on its way to the host, complete once `wait` returns it."""

    def __init__(self, tensor: Tensor, done: torch.cuda.Event | None = None) -> None:
        self._tensor = tensor
        self._done = done
        self.nbytes = tensor.nbytes

    @property
    def is_here(self) -> bool:
        """Whether `wait` returns at once."""
        return self._done is None or bool(self._done.query())  # type: ignore[no-untyped-call]

    def wait(self) -> Tensor:
        """The tensor, on any thread. Raises what CUDA has found wrong by then."""
        if self._done is not None:
            self._done.synchronize()
        return self._tensor


class CopyStream:
    """Of the thread that computes on `device`. Without a `stream`, on a CPU, nothing is copied."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self._device = device
        self._stream = stream
        self._leaving: deque[torch.cuda.Event] = deque()

    @classmethod
    def beside(cls, device: torch.device) -> CopyStream:
        """A new one, for a device of any kind."""
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        return cls(device, stream)

    def fetch(self, tensor: Tensor) -> AsyncCopy:
        """The values that a tensor will have once all is done that is queued by now, on the host.

        Where MAX_LEAVING are on their way, the first of them is waited for.
        """
        if self._stream is None:
            return AsyncCopy(tensor)
        if len(self._leaving) == MAX_LEAVING:
            self._leaving.popleft().synchronize()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        host = pinned(tensor)
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
            done = self._stream.record_event()
        self._leaving.append(done)
        tensor.record_stream(self._stream)  # its memory is not used again before the copy is done
        return AsyncCopy(host, done)


def pinned(tensor: Tensor) -> Tensor:
    """Room on the host for a tensor, which a GPU can read and write by itself."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
