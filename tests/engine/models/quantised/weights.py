"""Small weights turned back into the weights that their codes stand for."""

from __future__ import annotations

import torch

from engine.models.quantised.weight import CodedWeight, StackedWeight


def dequantised(weight: object) -> torch.Tensor:
    """float32 [n, k], its columns in the order of the layer's input."""
    if isinstance(weight, StackedWeight):
        return torch.cat([dequantised(part) for part in weight.parts])
    if not isinstance(weight, CodedWeight):
        assert isinstance(weight, torch.Tensor)
        return weight.float()
    floats = weight._floats(slice(None))
    return floats if weight.order is None else torch.empty_like(floats).index_copy_(1, weight.order, floats)
