"""Peak memory of a piece of work, as counted by the device's allocator or the kernel."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import nn

from common.process import malloc

_RESET_PEAK: Final = "5"  # proc(5), clear_refs


class PeakMemory:
    """Measure the body of a `with` block: `size_bytes` is the peak beyond the level before.

    On CUDA that is torch's own count; on a CPU it is resident memory by the kernel's, which includes what a library
    takes for itself and what malloc keeps. `size_bytes` is None where the kernel does not let a process ask (other
    systems than Linux, some sandboxes).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: int | None = None
        self.size_bytes: int | None = None

    def __enter__(self) -> PeakMemory:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        else:
            release_free_memory(self._device)
            with contextlib.suppress(OSError, AttributeError):
                Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
                self._before = _status_bytes("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            peak = torch.cuda.max_memory_allocated(self._device)
        else:
            peak = _status_bytes("VmHWM")
        self.size_bytes = max(0, peak - self._before)


def release_free_memory(device: torch.device) -> None:
    """Return cached memory of a device's allocator to the system; of malloc, glibc's only."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        malloc.return_free_pages()


class _EnoughError(Exception):
    pass


@contextlib.contextmanager
def one_layer_of_each_stack(module: nn.Module, deadline_s: float) -> Iterator[None]:
    """End a forward pass early within the block, after `deadline_s` (time.monotonic) and the first layer of each stack:
    later layers need the same memory again."""

    def stop_if_late(*_: object) -> None:
        if time.monotonic() > deadline_s:
            raise _EnoughError

    stacks = [child for child in module.modules() if isinstance(child, nn.ModuleList)]
    hooks = [layer.register_forward_pre_hook(stop_if_late) for stack in stacks for layer in list(stack)[1:]]
    try:
        with contextlib.suppress(_EnoughError):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def extrapolate(measured: Sequence[tuple[int, int]], num_rows: int) -> int:
    """Return the bytes of `num_rows`, by the line through the last two of `measured`: rows and their bytes, by rows."""
    rows, size = measured[-1]
    fewer, smaller = measured[-2] if len(measured) > 1 else (0, 0)
    return size + max(0, size - smaller) * (num_rows - rows) // max(1, rows - fewer)


def _status_bytes(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found.group(1))
