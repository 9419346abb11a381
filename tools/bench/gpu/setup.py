"""The ground of every GPU benchmark: the device, its limits, how calls are timed, and parts that fail by themselves."""

from __future__ import annotations

import gc
import io
import secrets
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec

import numpy as np
import torch
from PIL import Image

from tools.bench.gpu.figures import Figure, failure, rate
from tools.gpu_check.shapes import Shape

COPY_BYTES, TOY_COPY_BYTES = 4 * 2**30, 8 * 2**20
MATRIX_SIZE, TOY_MATRIX_SIZE = 8192, 256
P = ParamSpec("P")


@dataclass(frozen=True)
class Limits:
    """The most that a device does, measured in the same run as the figures beside it.

    `copy_bytes_per_s` counts bytes read and bytes written; `matmul_flops_per_s` a multiplication and an addition.
    """

    copy_bytes_per_s: float
    matmul_flops_per_s: float

    def least_s(self, size_bytes: float, flops: float = 0.0) -> float:
        """Return the least seconds for reading the bytes and for the arithmetic: the larger of both (the roofline)."""
        return max(size_bytes / self.copy_bytes_per_s, flops / self.matmul_flops_per_s)

    def bound(self, size_bytes: float, flops: float) -> str:
        """Return which of the two decides, in words."""
        by_bytes = size_bytes / self.copy_bytes_per_s >= flops / self.matmul_flops_per_s
        return "bound by bytes" if by_bytes else "bound by arithmetic"


@dataclass(frozen=True)
class Setup:
    """The parameters of a benchmark.

    `toy` shrinks models and loads until a CPU is through in seconds; the figures then mean nothing. `folder` is for
    model folders and goes when the benchmark is over. `systems` are those of `serving`, all where there are none.
    """

    device: torch.device
    limits: Limits
    folder: Path
    toy: bool = False
    repetitions: int = 5
    systems: tuple[str, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of models with random weights."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def time(self, call: Callable[[], object], *, calls: int = 1) -> list[float]:
        """Return seconds of one call for each repetition; each is the mean of `calls` in a row."""
        return time_calls(call, self.device, repetitions=self.repetitions, calls=calls)

    def model(self, make: Callable[..., Shape]) -> Path:
        """Return the folder of a model of this shape, or of its toy."""
        shape = make(toy=self.toy)
        return shape.write(self.folder / shape.name.replace(" ", "-"))


def measure_limits(device: torch.device, *, toy: bool = False, repetitions: int = 10) -> tuple[Limits, list[Figure]]:
    """Time a copy within the device's memory, and a product of two square matrices of random bfloat16."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    size, side = (TOY_COPY_BYTES, TOY_MATRIX_SIZE) if toy else (COPY_BYTES, MATRIX_SIZE)
    copying = _time_copy(size, device, repetitions)
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    multiplying = time_calls(lambda: left @ right, device, repetitions=repetitions, warm_up=3)
    copied, flops = 2 * size, 2 * side**3
    matrices = f"matrices of {side}, {str(dtype).removeprefix('torch.')}"
    figures = [
        rate("limits", f"copy of {size >> 20} MiB, read and written", "GB/s", copying, copied / 1e9),
        rate("limits", matrices, "TFLOP/s", multiplying, flops / 1e12),
    ]
    return Limits(copied / statistics.median(copying), flops / statistics.median(multiplying)), figures


def _time_copy(size_bytes: int, device: torch.device, repetitions: int) -> list[float]:
    source = torch.empty(size_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return time_calls(lambda: target.copy_(source), device, repetitions=repetitions, warm_up=3)


def time_calls(
    call: Callable[[], object], device: torch.device, *, repetitions: int, calls: int = 1, warm_up: int = 1
) -> list[float]:
    """Return seconds of one call for each repetition; each is the mean of `calls` in a row, which may overlap.

    On a GPU the clock runs from an idle device to an idle device, gaps included in which it waits for the host.
    """
    for _ in range(warm_up):
        call()
    means = []
    for _ in range(repetitions):
        _wait_for(device)
        began_s = time.perf_counter()
        for _ in range(calls):
            call()
        _wait_for(device)
        means.append((time.perf_counter() - began_s) / calls)
    return means


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def attempted(
    benchmark: str, case: str, measure: Callable[P, Iterable[Figure]], *args: P.args, **options: P.kwargs
) -> Iterator[Figure]:
    """Yield the figures of one part, and a row with the error if the part fails; the traceback is printed.

    Device memory that the part has released is free for the next part.
    """
    try:
        yield from measure(*args, **options)
    except Exception as error:
        traceback.print_exc()
        yield failure(benchmark, case, error)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def noise_image(side: int) -> bytes:
    """Return a PNG file of `side` x `side` pixels of noise, new each time: no cache has seen the image."""
    noise = np.random.default_rng(secrets.randbits(64)).integers(0, 256, (side, side, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG", compress_level=1)
    return file.getvalue()
