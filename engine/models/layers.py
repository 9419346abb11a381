"""Layers shared by decoders, computed by PyTorch or by a kernel of `engine.native`.

C++ kernels serve bfloat16 on a CPU, and linear layers of few float32 rows. Triton kernels serve CUDA. Neither is used
before it is enabled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.telemetry import get_logger
from engine.models.config import TextConfig
from engine.models.quantised.weight import SmallWeight
from engine.native import ops
from engine.native.build import in_one_line

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
_SCALED_ROPE: Final = ("linear", "llama3", "yarn")
_TRIAL_SIZE: Final = 64

log = get_logger()


def activation(name: str) -> Activation:
    """Return the activation of a name in config.json. Raises ValueError for an unsupported name."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


class LayerKernels(Protocol):
    """The kernels that `native.ops` and `native.fused` both have, and describe. Ask `serves_...` first."""

    def serves_rows(self, x: Tensor) -> bool: ...
    def add_rms_norm(self, hidden: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> Tensor: ...
    def silu_mul(self, gate_up: Tensor) -> Tensor: ...
    def serves_rotation(self, x: Tensor) -> bool: ...
    def rotate(self, x: Tensor, cosines: Tensor, signed_sines: Tensor) -> None: ...


_on_cuda: LayerKernels | None = None


def kernels_for(x: Tensor) -> LayerKernels | None:
    """Return the enabled kernels for a tensor's device and dtype; None where PyTorch computes alone."""
    if x.is_cuda:
        return _on_cuda
    return ops if x.dtype == torch.bfloat16 and ops.is_enabled() else None


def use_layer_kernels(device: torch.device, attention_backend: str) -> bool:
    """Enable Triton's kernels for the decoders of this process on CUDA; the attention backend `torch` opts out.

    Each kernel is tried once. Return False, with a warning, where Triton is missing or cannot compile.
    """
    global _on_cuda
    if device.type != "cuda" or attention_backend == "torch":
        return True
    try:
        from engine.native import fused

        # Each kernel is compiled and run once; the device is waited for.
        x = torch.ones(1, _TRIAL_SIZE, dtype=torch.float16, device=device)
        fused.add_rms_norm(x, x.clone(), x[0].clone(), 1e-5)
        fused.silu_mul(x)
        fused.rotate(x[:, None], x[:, None].clone(), x[:, None].clone())
        torch.cuda.synchronize(device)
    except Exception as error:  # of an import, a compiler or a driver: their exceptions are documented nowhere
        reason = f"Triton does not run ({in_one_line(error)}); it comes with PyTorch for CUDA and needs gcc or clang"
        log.warning("small layers are computed by PyTorch alone, which is slower", reason=reason)
        return False
    _on_cuda = fused
    return True


class Linear(nn.Linear):
    """[..., in_features] -> [..., out_features]; a quantised weight can take the place of the parameter."""

    def replace_weight(self, weight: SmallWeight) -> None:
        del self.weight
        self.weight = weight  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor | SmallWeight, bias: Tensor | None = None) -> Tensor:
    """x [..., k], weight [n, k] -> [..., n]"""
    if isinstance(weight, SmallWeight):
        return weight.multiply(x, bias)
    if ops.serves_linear(x, weight):
        return ops.linear(x, weight, bias)
    return F.linear(x, weight, bias)


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich, 2019), summed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, hidden: Tensor, added: Tensor | None = None) -> Tensor:
        """Return the norm of hidden + added and leave the sum in `hidden`; None adds nothing."""
        kernels = kernels_for(hidden)
        served = kernels is not None and kernels.serves_rows(hidden)
        if added is not None and not (served and hidden.is_contiguous() and added.is_contiguous()):
            hidden, added = hidden.add_(added), None
        if kernels is not None and served:
            return kernels.add_rms_norm(hidden, added, self.weight, self.eps)
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[m, 2 * n] -> [m, n]: silu of the first half times the second (SwiGLU, Shazeer, 2020)."""
    kernels = kernels_for(gate_up)
    if kernels is not None and kernels.serves_rows(gate_up):
        return kernels.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


class Rotary:
    """Rotary positions (Su et al., 2021), with a single axis or M-RoPE's three (Qwen2-VL, 2024).

    Cosines and sines are computed in float32 once per step and shared by all layers. Raises ValueError for unknown
    variants and for frequencies that change with the sequence length: cached keys would have to be rotated again.
    """

    def __init__(self, config: TextConfig) -> None:
        with torch.device("cpu"):  # also while the model around it is built without memory
            self._inv_freq, self._scaling = _frequencies(config)
            self._axis = _axis_of_frequency(config)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines, and sines with the sign of `rotate`: positions [n] or [3, n] -> 2 x [n, 1, head_dim]."""
        if self._inv_freq.device != positions.device:
            self._inv_freq = self._inv_freq.to(positions.device)
            self._axis = None if self._axis is None else self._axis.to(positions.device)
        if positions.ndim == 2 and self._axis is not None:
            angles = positions.float()[self._axis].t() * self._inv_freq
        else:
            angles = positions[:, None].float() * self._inv_freq
        cos, sin = angles.cos() * self._scaling, angles.sin() * self._scaling
        cosines, sines = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return cosines[:, None].to(dtype), sines[:, None].to(dtype)


def rotate(x: Tensor, cosines: Tensor, signed_sines: Tensor) -> Tensor:
    """Return x [n, heads, head_dim] rotated: x * cos + (-x2, x1) * sin; the sines carry the minus. May reuse `x`."""
    kernels = kernels_for(x)
    if kernels is not None and kernels.serves_rotation(x):
        kernels.rotate(x, cosines, signed_sines)
        return x
    return torch.addcmul(x * cosines, x.roll(x.shape[-1] // 2, -1), signed_sines).to(x.dtype)


def _frequencies(config: TextConfig) -> tuple[Tensor, float]:
    """Return radians per position [head_dim / 2], and the factor of cosines and sines."""
    rope_type = config.rope["rope_type"]
    if rope_type == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float) / config.head_dim
        return 1.0 / (config.rope["rope_theta"] ** exponents), 1.0
    if rope_type not in _SCALED_ROPE:
        raise ValueError(f"rope type {rope_type!r} is not supported; supported: default, {', '.join(_SCALED_ROPE)}")
    # Only scaled variants need transformers' formulas; transformers is slow to import.
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    view = SimpleNamespace(
        rope_parameters=config.rope,
        head_dim=config.head_dim,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        max_position_embeddings=config.max_position_embeddings,
        standardize_rope_params=lambda: None,
    )
    frequencies, scaling = ROPE_INIT_FUNCTIONS[rope_type](view)
    return frequencies, float(scaling)


def _axis_of_frequency(config: TextConfig) -> Tensor | None:
    """Return the axis (time, height or width) of each frequency; None for positions with a single axis.

    (4, 2, 2) in sections: t t t t h h w w; interleaved (Qwen3-VL), with time in the rest: t h w t h w t t.
    """
    if config.mrope_section is None:
        return None
    if not config.mrope_interleaved:
        return torch.arange(3).repeat_interleave(torch.tensor(config.mrope_section))
    axes = torch.zeros(config.head_dim // 2, dtype=torch.long)
    for axis in (1, 2):
        axes[axis : 3 * config.mrope_section[axis] : 3] = axis
    return axes
