"""Memory of a GPU, and the part not available to tensors: for planners and for workers."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from common.config import EngineConfig

GPU_FRACTION: Final = 0.9
"""Of a GPU, for all workers on it together: the rest is for what nobody counts, a display's or a tool's."""
PROCESS_BYTES: Final = 768 * 2**20
"""GPU memory of a process outside torch's allocator: CUDA's context with the loaded kernels (some 500 MiB on an H100),
and the memory of tensors on their way out (128 MiB). CUDA tells no process its own share. NIXL's memory comes on top:
EngineConfig.process_bytes."""


def process_bytes(engine: EngineConfig) -> int:
    """Return a worker's GPU memory outside of torch's allocator: by the settings, or the usual amount."""
    return PROCESS_BYTES if engine.process_bytes is None else engine.process_bytes


def total_gpu_memory(library: str = "libcuda.so.1") -> int | None:
    """Return the bytes of the first visible GPU; None without a GPU. The call makes no context: the number comes from
    the driver's own library (https://docs.nvidia.com/cuda/cuda-driver-api)."""
    try:
        cuda = ctypes.CDLL(library)
        device, size = ctypes.c_int(), ctypes.c_size_t()
        failed = (
            cuda.cuInit(ctypes.c_uint(0))
            or cuda.cuDeviceGet(ctypes.byref(device), ctypes.c_int(0))
            or cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)
        )
        return None if failed else size.value
    except (OSError, AttributeError):
        return None
