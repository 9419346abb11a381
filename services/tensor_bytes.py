"""Tensors as the bytes that travel."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch

ALIGNMENT_BYTES: Final = 8


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, not copied, whatever the dtype: numpy knows no bf16."""
    as_bytes: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(as_bytes)


def aligned(data: memoryview) -> memoryview:
    """The same bytes at an address that tensors may use; copied only where a transport has put them at an odd one."""
    address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return data if address % ALIGNMENT_BYTES == 0 else memoryview(bytearray(data))
