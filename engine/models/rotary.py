"""Rotary positions (Su et al., 2021), of one axis or of M-RoPE's three (Qwen2-VL, 2024)."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from engine.models.config import TextConfig
from engine.native.choice import kernels_for

_SCALED = ("linear", "llama3", "yarn")


class Rotary:
    """Cosines and sines of one step's positions, computed in float32 once and shared by all layers.

    Raises ValueError for variants that are not known, or whose frequencies change with the length of the sequence:
    keys in the cache would have to be rotated again.
    """

    def __init__(self, config: TextConfig) -> None:
        with torch.device("cpu"):  # also while the model around it is built without memory
            self._inv_freq, self._scaling = _frequencies(config)
            self._axis = _axis_of_frequency(config)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines, and sines with the sign of `rotate`: positions [n] or [3, n] -> 2 x [n, 1, head_dim]."""
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
    """x [n, heads, head_dim] rotated: x * cos + (-x2, x1) * sin, the minus being in the sines already.

    `x` itself may be what is returned.
    """
    kernels = kernels_for(x)
    if kernels is not None and kernels.serves_rotation(x):
        kernels.rotate(x, cosines, signed_sines)
        return x
    return torch.addcmul(x * cosines, x.roll(x.shape[-1] // 2, -1), signed_sines)


def _frequencies(config: TextConfig) -> tuple[Tensor, float]:
    """Radians per position [head_dim / 2], and the factor of cosines and sines."""
    rope_type = config.rope["rope_type"]
    if rope_type == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float) / config.head_dim
        return 1.0 / (config.rope["rope_theta"] ** exponents), 1.0
    if rope_type not in _SCALED:
        raise ValueError(f"rope type {rope_type!r} is not supported; supported: default, {', '.join(_SCALED)}")
    # Only scaled variants need transformers, whose formulas these are; it is slow to import.
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
    """For each frequency, which of (time, height, width) turns it; None where positions have one axis.

    (4, 2, 2) in sections: t t t t h h w w; interleaved (Qwen3-VL), whatever is left over being time: t h w t h w t t.
    """
    if config.mrope_section is None:
        return None
    if not config.mrope_interleaved:
        return torch.arange(3).repeat_interleave(torch.tensor(config.mrope_section))
    axes = torch.zeros(config.head_dim // 2, dtype=torch.long)
    for axis in (1, 2):
        axes[axis : 3 * config.mrope_section[axis] : 3] = axis
    return axes
