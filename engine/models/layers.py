"""Layers that decoders share: PyTorch's, or our own kernels where these serve (bfloat16 on a CPU, CUDA)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.native import ops
from engine.native.choice import kernels_for


class Linear(nn.Linear):
    """[m, in_features] -> [m, out_features]"""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [m, k], weight [n, k] -> [m, n]"""
    if ops.serves_linear(x, weight):
        return ops.linear(x, weight, bias)
    return F.linear(x, weight, bias)


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich, 2019), summed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        kernels = kernels_for(hidden)
        if kernels is not None and kernels.serves_norm(hidden):
            return kernels.add_rms_norm(hidden, None, self.weight, self.eps)
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)

    def add(self, hidden: Tensor, added: Tensor | None) -> Tensor:
        """The norm of hidden + added, which is left in `hidden`; None adds nothing."""
        if added is None:
            return self.forward(hidden)
        kernels = kernels_for(hidden)
        if kernels is not None and kernels.serves_norm(hidden) and hidden.is_contiguous() and added.is_contiguous():
            return kernels.add_rms_norm(hidden, added, self.weight, self.eps)
        return self.forward(hidden.add_(added))


def silu_mul(gate_up: Tensor) -> Tensor:
    """[m, 2 * n] -> [m, n]: silu of the first half times the second (SwiGLU, Shazeer, 2020)."""
    kernels = kernels_for(gate_up)
    if kernels is not None and kernels.serves_gate(gate_up):
        return kernels.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
