"""A tensor that its device may still compute.

The thread that launches steps does not wait for the device; whoever wants a tensor does. What comes from other workers
is on the device before the engine hears of it (services.handoff.payloads).
"""

from __future__ import annotations

import torch
from torch import Tensor


class PendingTensor:
    """A tensor, complete on its device after `wait`."""

    def __init__(self, tensor: Tensor) -> None:
        """Mark the end of the work queued so far, on the thread whose stream computes the tensor."""
        self._tensor = tensor
        self._done = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None
        self.is_cuda = tensor.is_cuda
        """Whether `wait` may wait."""
        self.nbytes = tensor.nbytes

    def wait(self) -> Tensor:
        """Return the tensor, on any thread. Raises CUDA's errors up to its computation."""
        if self._done is not None:
            self._done.synchronize()
        return self._tensor
