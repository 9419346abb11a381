"""How long calls take on a device: CUDA events around them on a GPU, the wall clock on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def time_calls(
    call: Callable[[], object], device: torch.device, *, repetitions: int, calls: int = 1, warm_up: int = 1
) -> list[float]:
    """Seconds of one call, `repetitions` times; each is the mean of `calls` in a row, which may overlap on the device.

    Events count from the first kernel to the last, and the gaps between them in which the device waits for the host.
    """
    for _ in range(warm_up):
        call()
    measure = _with_events if device.type == "cuda" else _with_clock
    return [measure(call, calls) / calls for _ in range(repetitions)]


def _with_events(call: Callable[[], object], calls: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _with_clock(call: Callable[[], object], calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - began
