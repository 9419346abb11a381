"""The activations that checkpoints name in their configuration."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch.nn.functional as F
from torch import Tensor

Activation = Callable[[Tensor], Tensor]

_TANH_GELU = partial(F.gelu, approximate="tanh")
ACTIVATIONS: Final[dict[str, Activation]] = {
    "gelu": F.gelu,
    "gelu_new": _TANH_GELU,
    "gelu_pytorch_tanh": _TANH_GELU,
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
}


def activation(name: str) -> Activation:
    """The activation of a name in config.json. Raises ValueError for one that is not computed here."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
