"""A worker's share of a GPU used by several processes.

    total = this process (torch's allocator + process_bytes) + other processes + free
            |<----------- at most memory_fraction x total ->|

The share counts what this process has taken, never what others have: several workers on one GPU get what they are told,
in whatever order they start.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from common.config import EngineConfig
from common.errors import TriptychError
from common.process.gpu_memory import GPU_FRACTION, process_bytes


@dataclass(frozen=True)
class GpuMemory:
    """Bytes of a GPU at a moment. `reserved` is held by torch's allocator in this process."""

    total: int
    free: int
    reserved: int


def measure_gpu(device: torch.device) -> GpuMemory:
    """Measure the memory of a CUDA device; creates this process's context if necessary."""
    free, total = torch.cuda.mem_get_info(device)
    return GpuMemory(total, free, torch.cuda.memory_reserved(device))


def cuda_budget(config: EngineConfig, memory: GpuMemory) -> int:
    """Return the bytes still available to this process, within its share of the device.

    Raises TriptychError("invalid_request") with the numbers where that much is not free.
    """
    fraction = config.memory_fraction or GPU_FRACTION
    own = memory.reserved + process_bytes(config)
    budget = max(0, int(fraction * memory.total) - own)
    if budget <= memory.free:
        return budget
    others = max(0, memory.total - memory.free - own)  # as near as can be told
    possible = (own + memory.free) / memory.total
    message = (
        f"the GPU has {in_words(memory.total)}, of which this worker may take {fraction:g}, {in_words(budget)} more "
        f"than it has by now; only {in_words(memory.free)} are free, for other processes hold "
        f"{in_words(others)}: give each worker of this GPU its share by --memory-fraction (here at most "
        f"{max(0.01, possible - 0.005):.2f}), 0.9 altogether, or end what else runs there"
    )
    raise TriptychError("invalid_request", message, "memory_fraction")


def in_words(size_bytes: int) -> str:
    """A size for a person: 512 KiB, 1.5 GiB."""
    if abs(size_bytes) < 2**20:
        return f"{size_bytes / 2**10:.3g} KiB"
    if abs(size_bytes) < 1000 * 2**20:
        return f"{size_bytes / 2**20:.3g} MiB"
    return f"{size_bytes / 2**30:.3g} GiB"
