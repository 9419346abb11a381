"""Random weights made in place: sizes and speed of a model without its checkpoint (vLLM's `dummy`)."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

SEED: Final = 0
_VECTOR_SPREAD: Final = 0.02


@torch.no_grad()
def draw_weights(module: nn.Module, device: torch.device, dtype: torch.dtype) -> int:
    """Replace the module's parameters (on the meta device) by random values in `dtype` on `device`; return their bytes.

    Matrices keep the size of what goes through them, norms begin at 1, so that nothing overflows in float16. Equal in
    all processes with the same kind of device and the same torch.
    """
    generator = torch.Generator(device).manual_seed(SEED)
    state = {
        name: _draw(name, torch.empty(parameter.shape, dtype=dtype, device=device), generator)
        for name, parameter in module.named_parameters()
    }
    module.load_state_dict(state, assign=True)
    module.requires_grad_(False).eval()
    return sum(tensor.nbytes for tensor in state.values())


def _draw(name: str, out: Tensor, generator: torch.Generator) -> Tensor:
    if out.ndim < 2:
        is_scale = name.endswith("weight") or out.ndim == 0  # of a norm, or a gate
        return out.normal_(float(is_scale), _VECTOR_SPREAD, generator=generator)
    return out.normal_(0.0, out[0].numel() ** -0.5, generator=generator)
