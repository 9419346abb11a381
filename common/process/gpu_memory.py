"""How much memory a GPU has, and what is not for tensors: for those that share it out, and those that take it."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from common.config import EngineConfig

GPU_FRACTION: Final = 0.9
"""Of a GPU, for all workers on it together: the rest is for what nobody counts, a display's or a tool's."""
PROCESS_BYTES: Final = 768 * 2**20
"""What a process takes of a GPU outside torch's allocator: CUDA's context with the kernels that it has loaded (some 500
MiB on an H100), and the memory that tensors leave by (128 MiB). CUDA tells no process how much its own share is. What
NIXL takes beside that comes on top: EngineConfig.process_bytes."""


def process_bytes(engine: EngineConfig) -> int:
    """What a worker's process takes of a GPU outside torch's allocator: as the settings say, else as is usual."""
    return PROCESS_BYTES if engine.process_bytes is None else engine.process_bytes


def total_gpu_memory(library: str = "libcuda.so.1") -> int | None:
    """Bytes of the first GPU that this process sees; None where there is none. Takes nothing of the GPU: no context is
    made, by the driver's own library (https://docs.nvidia.com/cuda/cuda-driver-api)."""
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
