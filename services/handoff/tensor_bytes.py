"""Tensors as bytes for transports, and back."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

# Received bytes are read-only, and torch has no read-only tensors. They are only read.
warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)

ALIGNMENT_BYTES: Final = 8


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory, not copied, for any dtype (numpy lacks bf16)."""
    as_bytes: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(as_bytes)


def tensor_of(data: memoryview, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a read-only tensor over exactly its bytes; bytes at an odd address are copied."""
    if data.nbytes == 0:
        return torch.empty(tuple(shape), dtype=dtype)  # torch makes no tensor over zero bytes
    return torch.frombuffer(aligned(data), dtype=dtype).view(tuple(shape))


def aligned(data: memoryview) -> memoryview:
    """Return the bytes at an aligned address; bytes at an odd address are copied."""
    address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return data if address % ALIGNMENT_BYTES == 0 else memoryview(bytearray(data))
