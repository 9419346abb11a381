"""The weight of a linear layer as small codes: multiplied by a kernel that reads them, or turned back by PyTorch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.native import quantised

BLOCK: Final = 32
"""4-bit codes lie in blocks of so many columns: byte i of a block holds code i below code 16 + i."""
_PIECE_BYTES: Final = 16 * 2**20
_LARGEST: Final = 127


class SmallWeight(ABC):
    """Takes the place of a weight [n, k] of a linear layer."""

    nbytes: int

    @abstractmethod
    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [m, k] -> [m, n]"""


@dataclass(frozen=True, eq=False)
class CodedWeight(SmallWeight):
    """(code - zero) * scale, rounded to float32.

    `codes`: int8 or float8_e4m3fn [n, k], or uint8 [n, k / 2] of pairs of 4-bit codes. `scales` and `zeros` are float32
    [n, groups]; a group has `group` columns. `order` [k]: column i of the codes is for column order[i] of the input.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group: int
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), self.codes.shape[1] * (1 + (self.codes.dtype == torch.uint8))

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return sum(one.nbytes for one in (self.codes, self.scales, self.zeros, self.order) if one is not None)

    def to(self, device: torch.device) -> CodedWeight:
        zeros, order = (None if one is None else one.to(device) for one in (self.zeros, self.order))
        return CodedWeight(self.codes.to(device), self.scales.to(device), zeros, self.group, order)

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.order is not None:
            x = x.index_select(-1, self.order)
        if quantised.serves(x):
            return quantised.linear(x, self.codes, self.scales, self.zeros, self.group, bias)
        out = x.new_empty(*x.shape[:-1], len(self.codes))
        step = max(1, _PIECE_BYTES // (4 * x.shape[-1]))
        for first in range(0, len(self.codes), step):
            rows = slice(first, first + step)
            out[..., rows] = F.linear(x, self._floats(rows).to(x.dtype), None if bias is None else bias[rows])
        return out

    def _floats(self, rows: slice) -> Tensor:
        codes = self.codes[rows]
        codes = (unpack_pairs(codes) if codes.dtype == torch.uint8 else codes).float()
        size = codes.shape[1]
        if self.zeros is not None:
            codes = codes.sub_(_widened(self.zeros[rows], self.group, size))
        return codes.mul_(_widened(self.scales[rows], self.group, size))


@dataclass(frozen=True, eq=False)
class StackedWeight(SmallWeight):
    """Weights below each other that are not quantised alike, or not at all."""

    parts: Sequence[SmallWeight | Tensor]

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return sum(part.nbytes for part in self.parts)

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        outputs = (part.multiply(x) if isinstance(part, SmallWeight) else F.linear(x, part) for part in self.parts)
        out = torch.cat(list(outputs), dim=-1)
        return out if bias is None else out.add_(bias)


def stacked(parts: Sequence[SmallWeight | Tensor]) -> SmallWeight:
    """Return the weight with the rows of all parts: a single product if they are coded alike."""
    first = parts[0]
    if len(parts) == 1 and isinstance(first, SmallWeight):
        return first
    coded = [part for part in parts if isinstance(part, CodedWeight)]
    if len(coded) < len(parts) or not all(_alike(coded[0], part) for part in coded):
        return StackedWeight(parts)
    zeros = None if coded[0].zeros is None else torch.cat([part.zeros for part in coded if part.zeros is not None])
    codes = torch.cat([part.codes.view(torch.uint8) for part in coded]).view(coded[0].codes.dtype)
    return CodedWeight(codes, torch.cat([part.scales for part in coded]), zeros, coded[0].group, coded[0].order)


def _alike(one: CodedWeight, other: CodedWeight) -> bool:
    kinds = [(part.codes.dtype, part.group, part.zeros is None, part.order is None) for part in (one, other)]
    same_order = one.order is None or other.order is None or torch.equal(one.order, other.order)
    return kinds[0] == kinds[1] and same_order


def quantise_int8(weight: Tensor) -> CodedWeight:
    """Round each row of a weight [n, k] to 8-bit integers: its largest absolute value becomes 127."""
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(len(weight), 1, device=weight.device)
    step = max(1, _PIECE_BYTES // (4 * weight.shape[1]))
    for first in range(0, len(weight), step):
        rows = slice(first, first + step)
        floats = weight[rows].float()
        largest = floats.abs().amax(dim=1, keepdim=True)
        scales[rows] = (largest / _LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
        codes[rows] = torch.div(floats, scales[rows]).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8)
    return CodedWeight(codes, scales, None, weight.shape[1])


def pack_pairs(codes: Tensor) -> Tensor:
    """4-bit codes uint8 [n, k], k a multiple of BLOCK -> [n, k / 2]"""
    blocks = codes.view(len(codes), -1, 2, BLOCK // 2)
    return (blocks[:, :, 0] | (blocks[:, :, 1] << 4)).view(len(codes), -1)


def unpack_pairs(pairs: Tensor) -> Tensor:
    """uint8 [n, k / 2] -> [n, k]"""
    blocks = pairs.view(len(pairs), -1, BLOCK // 2)
    return torch.stack((blocks & 15, blocks >> 4), dim=2).view(len(pairs), -1)


def _widened(values: Tensor, group: int, size: int) -> Tensor:
    """[n, groups] -> [n, size], or [n, 1] for a single group"""
    return values if values.shape[1] == 1 else values.repeat_interleave(group, dim=1)[:, :size]
