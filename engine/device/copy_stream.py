"""Copies from a GPU to pinned host memory, on a stream beside the computing stream.

    computing   ██ step N ██ gather ██ step N+1 ██████
    copying                         └▶ to the host ▒▒▒

The thread that launches steps does not wait for the device; whoever wants a copy does. What comes from other workers is
on the device before the engine hears of it (services.handoff.payloads).
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
    """A tensor under way to the host, complete after `wait`."""

    def __init__(self, tensor: Tensor, done: torch.cuda.Event | None = None) -> None:
        self._tensor = tensor
        self._done = done
        self.nbytes = tensor.nbytes

    @property
    def is_here(self) -> bool:
        """Whether `wait` returns at once."""
        return self._done is None or bool(self._done.query())  # type: ignore[no-untyped-call]

    def wait(self) -> Tensor:
        """Return the tensor, on any thread. Raises CUDA's errors up to the copy."""
        if self._done is not None:
            self._done.synchronize()
        return self._tensor


class CopyStream:
    """The copy stream of a thread computing on `device`. On a CPU, without a `stream`, tensors are not copied."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self._device = device
        self._stream = stream
        self._leaving: deque[torch.cuda.Event] = deque()

    @classmethod
    def beside(cls, device: torch.device) -> CopyStream:
        """Make a copy stream for a device of any kind."""
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        return cls(device, stream)

    def fetch(self, tensor: Tensor) -> AsyncCopy:
        """Copy a tensor's values to the host after all work queued so far.

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
    """Allocate host memory for a tensor, directly readable and writable by a GPU."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
