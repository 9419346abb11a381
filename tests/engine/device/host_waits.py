"""What would make the host wait for a GPU, found on a CPU: calls in the engine's code that read a tensor's values, or
that copy from pageable memory.

On a CPU tensors of the host and of the device look alike, so what the engine does to the host's own ones on purpose
(`engine/device/h2d.py`) is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

ROOT: Final = Path(__file__).parents[3]
_HOST: Final = ROOT / "engine/device/h2d.py"
_READING: Final = frozenset(
    ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero", "argwhere")
)
_READING_MORE: Final = frozenset(("masked_select", "unique", "unique_consecutive", "bincount", "equal", "allclose"))


class HostWaits(TorchFunctionMode):
    """Notes in `found` each place in the engine, "path:line what", that would have waited while this is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        frame = sys._getframe(1)
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT / "engine") and path != _HOST:
            why = _why(getattr(func, "__name__", ""), args, kwargs)
            if why is not None:
                self.found.add(f"{path.relative_to(ROOT)}:{frame.f_lineno} {why}")
        return func(*args, **kwargs)


def _why(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    if name in _READING or name in _READING_MORE or (name == "where" and len(args) == 1):
        return f"{name} reads what the device computes"
    if name in ("__getitem__", "__setitem__"):
        return _why_index(args[1])
    if name in ("tensor", "as_tensor") and kwargs.get("device") is not None:
        return f"{name} copies from pageable memory"
    if name == "to" and not kwargs.get("non_blocking") and (_is_device(args[1:]) or "device" in kwargs):
        return "to copies, and waits"
    if name == "repeat_interleave" and isinstance(_second(args), torch.Tensor) and kwargs.get("output_size") is None:
        return "repeat_interleave reads its counts"
    return None


def _why_index(index: Any) -> str | None:
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, list | np.ndarray):
            return "an index from the host is copied from pageable memory"
        if isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8):
            return "a mask as an index is counted first"
    return None


def _is_device(args: tuple[Any, ...]) -> bool:
    return bool(args) and isinstance(args[0], torch.device | str)


def _second(args: tuple[Any, ...]) -> Any:
    return args[1] if len(args) > 1 else None
