"""What this device can do at most, measured in the same run as the figures that are compared with it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch

from tools.bench_gpu.timing import time_calls
from tools.gpu_check.figures import Figure, rate

COPY_BYTES = 4 * 2**30
MATRIX_SIZE = 8192
TOY_COPY_BYTES = 8 * 2**20
TOY_MATRIX_SIZE = 256


@dataclass(frozen=True)
class Limits:
    """`copy_bytes_per_s` counts bytes read and bytes written; `matmul_flops_per_s` a multiplication and an addition."""

    copy_bytes_per_s: float
    matmul_flops_per_s: float

    def least_s(self, size_bytes: float, flops: float = 0.0) -> float:
        """The least time for reading so many bytes and computing so much: whichever takes longer (the roofline)."""
        return max(size_bytes / self.copy_bytes_per_s, flops / self.matmul_flops_per_s)

    def bound(self, size_bytes: float, flops: float) -> str:
        """Which of the two decides."""
        by_bytes = size_bytes / self.copy_bytes_per_s >= flops / self.matmul_flops_per_s
        return "bound by bytes" if by_bytes else "bound by arithmetic"


def measure_limits(device: torch.device, *, toy: bool = False, repetitions: int = 10) -> tuple[Limits, list[Figure]]:
    """A copy within the device's memory, and a product of two square matrices of random bfloat16."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    size, side = (TOY_COPY_BYTES, TOY_MATRIX_SIZE) if toy else (COPY_BYTES, MATRIX_SIZE)
    copying = _copy(size, device, repetitions)
    multiplying = _multiply(side, device, dtype, repetitions)
    copied, flops = 2 * size, 2 * side**3
    matrices = f"matrices of {side}, {str(dtype).removeprefix('torch.')}"
    figures = [
        rate("limits", f"copy of {size >> 20} MiB, read and written", "GB/s", copying, copied / 1e9),
        rate("limits", matrices, "TFLOP/s", multiplying, flops / 1e12),
    ]
    return Limits(copied / statistics.median(copying), flops / statistics.median(multiplying)), figures


def _copy(size_bytes: int, device: torch.device, repetitions: int) -> list[float]:
    source = torch.empty(size_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return time_calls(lambda: target.copy_(source), device, repetitions=repetitions, warm_up=3)


def _multiply(side: int, device: torch.device, dtype: torch.dtype, repetitions: int) -> list[float]:
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return time_calls(lambda: left @ right, device, repetitions=repetitions, warm_up=3)
