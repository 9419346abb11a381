"""What every benchmark is given: the device, its limits, how often to measure, and whether it is only a rehearsal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tools.bench_gpu.limits import Limits
from tools.bench_gpu.timing import time_calls
from tools.gpu_check.shapes import Shape


@dataclass(frozen=True)
class Setup:
    """`toy`: models and loads so small that a CPU is through in seconds; its figures mean nothing. `folder` is for
    model folders and goes when the benchmark is over."""

    device: torch.device
    limits: Limits
    folder: Path
    toy: bool = False
    repetitions: int = 5
    checkpoints: tuple[Path, ...] = ()
    """Folders of real checkpoints."""

    @property
    def dtype(self) -> torch.dtype:
        """That of the models with random weights."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def time(self, call: Callable[[], object], *, calls: int = 1, warm_up: int = 1) -> list[float]:
        """Seconds of one call, as many times as this setup repeats; each is the mean of `calls` in a row."""
        return time_calls(call, self.device, repetitions=self.repetitions, calls=calls, warm_up=warm_up)

    def model(self, make: Callable[..., Shape]) -> Path:
        """The folder of a model of this shape, or of its toy."""
        shape = make(toy=self.toy)
        return shape.write(self.folder / shape.name.replace(" ", "-"))


def checkpoints_in(models: Path | None) -> tuple[Path, ...]:
    """The checkpoints of a folder, each a folder with a config.json; none if there is no folder."""
    return () if models is None else tuple(sorted(path.parent for path in models.glob("*/config.json")))
