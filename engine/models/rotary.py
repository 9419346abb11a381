"""Rotary positions (Su et al., 2021), one-dimensional or in M-RoPE's three sections (Qwen2-VL, 2024)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_LENGTH_DEPENDENT = ("dynamic", "longrope")


class Rotary:
    """Cosines and sines of one step's positions, computed in float32 once and shared by all layers.

    Scaled variants (linear, llama3, yarn) take their frequencies from transformers itself.
    Raises ValueError for a variant whose frequencies change with the length of the sequence: keys in the cache would
    have to be rotated again.
    """

    def __init__(self, config: Any, head_dim: int) -> None:
        parameters = config.rope_parameters
        rope_type = parameters["rope_type"]
        with torch.device("cpu"):
            if rope_type == "default":
                exponents = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
                self.inv_freq, self.scaling = 1.0 / (parameters["rope_theta"] ** exponents), 1.0
            elif rope_type in ROPE_INIT_FUNCTIONS and rope_type not in _LENGTH_DEPENDENT:
                self.inv_freq, self.scaling = ROPE_INIT_FUNCTIONS[rope_type](config)
            else:
                raise ValueError(f"rope type {rope_type!r} is not supported; use default, linear, llama3 or yarn")
            self._axis = _axis_of_frequency(parameters.get("mrope_section"))
        if len(self.inv_freq) != head_dim // 2:
            raise ValueError(f"rotary positions over {2 * len(self.inv_freq)} of {head_dim} dimensions: not supported")

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines, and sines with the sign of `rotate`: positions [n] or [3, n] -> 2 x [n, 1, head_dim]."""
        if self.inv_freq.device != positions.device:
            self.inv_freq = self.inv_freq.to(positions.device)
            self._axis = None if self._axis is None else self._axis.to(positions.device)
        if positions.ndim == 2 and self._axis is not None:
            angles = positions.float()[self._axis].t() * self.inv_freq
        else:
            angles = positions[:, None].float() * self.inv_freq
        cos, sin = angles.cos() * self.scaling, angles.sin() * self.scaling
        cosines, sines = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return cosines[:, None].to(dtype), sines[:, None].to(dtype)


def rotate(x: Tensor, cosines: Tensor, signed_sines: Tensor) -> Tensor:
    """x [n, heads, head_dim] rotated: x * cos + (-x2, x1) * sin, the minus being in the sines already."""
    return torch.addcmul(x * cosines, x.roll(x.shape[-1] // 2, -1), signed_sines)


def _axis_of_frequency(mrope_section: list[int] | None) -> Tensor | None:
    """For each frequency, which of (time, height, width) turns it: the sections take turns."""
    if mrope_section is None:
        return None
    sections = torch.tensor(mrope_section)
    return (torch.arange(len(sections)) % 3).repeat_interleave(sections)
