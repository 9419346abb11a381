"""Tensors of a worker as payloads of transports, and back. dtypes and devices stay here: transports move bytes.

    bytes_of, tensor_of   host memory, without a copy
    Outgoing              tensors wait on the device, within a limit, until they have left
    payload_of            the tensor in place (cuda), or a copy in pinned host memory (all other transports)

Copies between devices run beside the engine's stream. Helper threads wait for copies, never the engine's thread.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import torch

from broker.transports.cuda.runtime import CudaError, CudaRuntime
from broker.transports.payload import DeviceBuffer, Payload
from common.config import Device
from common.errors import TriptychError
from engine.device.choice import choose_device

# Received bytes are read-only, and torch has no read-only tensors. They are only read.
warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)

ALIGNMENT_BYTES: Final = 8


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory, not copied, for any dtype (numpy lacks bf16)."""
    as_bytes: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(as_bytes)


def tensor_of(data: memoryview, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a read-only tensor over exactly these bytes; bytes at an odd address are copied."""
    if data.nbytes == 0:
        return torch.empty(tuple(shape), dtype=dtype)  # torch makes no tensor over zero bytes
    return torch.frombuffer(aligned(data), dtype=dtype).view(tuple(shape))


def aligned(data: memoryview) -> memoryview:
    """Return the bytes at an aligned address; bytes at an odd address are copied."""
    address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return data if address % ALIGNMENT_BYTES == 0 else memoryview(bytearray(data))


def open_cuda(device: Device) -> CudaRuntime | None:
    """Open CUDA for the tensors of a worker; None for an engine on a CPU.

    Raises TriptychError("invalid_request") if CUDA is requested and not available.
    """
    chosen = choose_device(device)
    if chosen.type != "cuda":
        return None
    try:
        return CudaRuntime(torch.cuda.current_device())
    except CudaError as error:
        raise TriptychError("invalid_request", f"device cuda: {error}", "device") from error


class Outgoing:
    """Tensors between their computation and their receipt: on the GPU up to `limit_bytes`, else in host memory."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._kept: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()  # by id

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a complete tensor's values contiguous, on any thread."""
        whole = tensor.detach()
        if whole.device.type == "cpu":
            return whole.contiguous()
        with self._lock:
            if sum(kept.nbytes for kept in self._kept.values()) + whole.nbytes <= self._limit_bytes:
                self._kept[id(whole)] = whole
                return whole
        return _pinned(whole)


def payload_of(tensor: torch.Tensor) -> Payload:
    """Return a contiguous, complete tensor as a payload for transports. Copies nothing yet; keeps the tensor."""
    if tensor.device.type == "cpu":
        return bytes_of(tensor)
    return DeviceBuffer(tensor.data_ptr(), tensor.nbytes, tensor, lambda: bytes_of(_pinned(tensor)))


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a complete tensor to pinned memory. Blocks for the copy alone, not for other work of the device."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    stream = _leaving(tensor.device)
    with torch.cuda.stream(stream):
        host.copy_(tensor, non_blocking=True)
        done = stream.record_event()
    done.synchronize()
    return host


@cache
def _leaving(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for copies to the host."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def compute_on_own_stream(device: torch.device) -> None:
    """Set a new stream for all work of this thread. Does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def keep_for_this_stream(tensor: torch.Tensor) -> None:
    """Keep the memory of another stream's tensor until this stream's last read. Called on the engine's thread."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
