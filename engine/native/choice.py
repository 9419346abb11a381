"""Which of our own kernels serve a decoder's small layers: those in C++ on a CPU, those in Triton on CUDA, or none."""

from __future__ import annotations

from typing import Final, Protocol

import torch
from torch import Tensor

from engine.native import ops
from engine.native.build import KernelsUnavailableError, in_one_line

_TRIAL_SIZE: Final = 64


class LayerKernels(Protocol):
    """What both modules have; callers ask `serves_...` first."""

    def serves_norm(self, hidden: Tensor) -> bool: ...

    def add_rms_norm(self, hidden: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Adds `added` to hidden, [..., size], in place and returns the norm of the sum."""

    def serves_gate(self, gate_up: Tensor) -> bool: ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[m, 2 * n] -> [m, n], silu of the first half times the second."""

    def serves_rotation(self, x: Tensor) -> bool: ...

    def rotate(self, x: Tensor, cosines: Tensor, signed_sines: Tensor) -> None:
        """x [n, heads, head_dim] in place; cosines and sines contiguous [n, 1, head_dim]."""


_on_cuda: LayerKernels | None = None


def kernels_for(x: Tensor) -> LayerKernels | None:
    """The kernels where a tensor is; None where PyTorch computes alone. None are used before they are enabled."""
    if x.is_cuda:
        return _on_cuda
    return ops if ops.is_enabled() else None


def enable_on_cuda(device: torch.device) -> None:
    """Use Triton's kernels on CUDA from now on.

    Each is tried once. Raises KernelsUnavailableError where Triton is not installed or cannot compile.
    """
    global _on_cuda
    try:
        from engine.native import fused

        _try(fused, device)
    except Exception as error:  # of an import, a compiler or a driver: what these raise is documented nowhere
        reason = f"Triton does not run ({in_one_line(error)}); it comes with PyTorch for CUDA and needs gcc or clang"
        raise KernelsUnavailableError(reason) from error
    _on_cuda = fused


def _try(kernels: LayerKernels, device: torch.device) -> None:
    """Compile and run each kernel once. Waits for the device."""
    x = torch.ones(1, _TRIAL_SIZE, dtype=torch.float16, device=device)
    kernels.add_rms_norm(x, x.clone(), x[0].clone(), 1e-5)
    kernels.silu_mul(x)
    kernels.rotate(x[:, None], x[:, None].clone(), x[:, None].clone())
    torch.cuda.synchronize(device)
