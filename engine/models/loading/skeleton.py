"""Modules without memory: their shapes, to be filled from a checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

_RANDOM: Final = ("normal_", "uniform_", "trunc_normal_", "kaiming_normal_", "kaiming_uniform_", "xavier_uniform_")
_FILLING: Final = frozenset((*_RANDOM, "xavier_normal_", "constant_", "zeros_", "ones_", "fill_", "zero_"))
"""In torch.nn.init and of tensors."""


@contextlib.contextmanager
def without_memory() -> Iterator[None]:
    """Create modules within the block on the meta device, without initialisation.

    There is nothing to initialise, and the attempt would cost a worker a second and 70 MB: drawing random numbers on
    the meta device makes torch import its compiler.
    """
    with torch.device("meta"), _WithoutFilling():
        yield


class _WithoutFilling(TorchFunctionMode):
    """Skip the filling of tensors without memory."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _FILLING:
            target = args[0] if args else kwargs.get("tensor")
            if isinstance(target, torch.Tensor) and target.is_meta:
                return target
        return func(*args, **kwargs)
