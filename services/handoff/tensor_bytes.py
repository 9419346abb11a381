"""Tensors as the bytes that travel."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

# Of bytes that transports let nobody write to. What has come is read, and torch has no tensors that say so.
warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)

ALIGNMENT_BYTES: Final = 8


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, not copied, whatever the dtype: numpy knows no bf16."""
    as_bytes: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(as_bytes)


def tensor_of(data: memoryview, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor over bytes that must be as many as it has; nobody may write to it. Copied only where they lie at an odd
    address."""
    if data.nbytes == 0:
        return torch.empty(tuple(shape), dtype=dtype)  # torch makes none over nothing
    return torch.frombuffer(aligned(data), dtype=dtype).view(tuple(shape))


def aligned(data: memoryview) -> memoryview:
    """The same bytes at an address that tensors may use; copied only where a transport has put them at an odd one."""
    address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return data if address % ALIGNMENT_BYTES == 0 else memoryview(bytearray(data))
