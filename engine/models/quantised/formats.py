"""Quantised weights as checkpoints hold them: AutoAWQ's, GPTQ's, fine-grained and plain FP8, compressed-tensors.

AutoAWQ's GEMM packing (Lin et al., 2023): integers of 32 bits along the output, eight codes each in the order 0 2 4 6
1 3 5 7. GPTQ (Frantar et al., 2022): along the input, lowest bits first; zero points along the output, in its first
version less by one; `g_idx` tells each input's group. compressed-tensors: along the input, codes counted from the
smallest. FP8: the weight itself, with a scale per tensor, row or block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from common.quantisation import Quantisation
from engine.models.checkpoint_index import CheckpointError
from engine.models.quantised.weight import BLOCK, CodedWeight, pack_pairs

_AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)


def decode_weight(base: str, tensors: Mapping[str, Tensor], how: Quantisation) -> CodedWeight:
    """Return the weight of the layer `base` from its tensors by role.

    Raises CheckpointError naming the layer, for tensors that are missing or whose shapes do not fit each other.
    """
    try:
        if how.method == "awq":
            return _awq(tensors)
        if how.method == "gptq":
            return _gptq(tensors, how)
        return _packed(tensors) if "weight_packed" in tensors else _scaled(tensors, how)
    except KeyError as error:
        raise CheckpointError(f"the quantised layer {base} has no {error.args[0]} ({how.method})") from error
    except (ValueError, RuntimeError) as error:
        raise CheckpointError(f"the quantised layer {base} ({how.method}): {' '.join(str(error).split())}") from error


def _awq(tensors: Mapping[str, Tensor]) -> CodedWeight:
    order = torch.tensor(_AWQ_ORDER).argsort()
    codes, zeros = (
        _unpack(tensors[name], 4).view(len(tensors[name]), -1, 8)[:, :, order].flatten(1)
        for name in ("qweight", "qzeros")
    )
    return _coded(codes.t(), tensors["scales"].t(), zeros.t(), 4)


def _gptq(tensors: Mapping[str, Tensor], how: Quantisation) -> CodedWeight:
    codes = _unpack(tensors["qweight"].t(), how.bits)
    # A zero point of 0 is stored as the largest code.
    zeros = (_unpack(tensors["qzeros"], how.bits).int() + how.zero_offset) % 2**how.bits
    return _coded(codes, tensors["scales"].t(), zeros.t(), how.bits, tensors.get("g_idx"))


def _packed(tensors: Mapping[str, Tensor]) -> CodedWeight:
    """compressed-tensors' pack-quantized: the width of a code is that by which the shape comes out."""
    rows, columns = tensors["weight_shape"].tolist()
    packed, scales = tensors["weight_packed"], tensors["weight_scale"]
    scales = scales.view(min(rows, scales.numel()), -1).expand(rows, -1)
    bits = 8 if packed.shape[1] == -(-columns // 4) else 4
    codes = _unpack(packed, bits)[:, :columns]
    if len(codes) != rows or codes.shape[1] != columns:
        raise ValueError(f"weight_packed of shape {tuple(packed.shape)} for a weight of {rows} x {columns}")
    zeros = torch.full_like(scales, 2 ** (bits - 1), dtype=torch.int32)
    if "weight_zero_point" in tensors:
        stored = tensors["weight_zero_point"]
        zeros = _unpack(stored.t(), bits).t()[:rows] if stored.dtype == torch.int32 else stored.int() + zeros
    groups = tensors.get("weight_g_idx")
    is_unused = groups is not None and bool((groups == -1).any())  # columns are in order
    return _coded(codes, scales, zeros, bits, None if is_unused else groups)


def _scaled(tensors: Mapping[str, Tensor], how: Quantisation) -> CodedWeight:
    """A weight of small dtype beside its scales."""
    weight = tensors["weight"]
    scales = tensors["weight_scale_inv" if "weight_scale_inv" in tensors else "weight_scale"].float()
    if weight.dtype not in (torch.float8_e4m3fn, torch.int8):
        raise ValueError(f"a weight of {str(weight.dtype).removeprefix('torch.')} beside scales; supported: E4M3, int8")
    if "weight_zero_point" in tensors and tensors["weight_zero_point"].any():
        raise ValueError("zero points of unpacked integers are not supported")
    rows, columns = weight.shape
    if how.block is not None and scales.ndim == 2:
        height, width = how.block
        if scales.shape != (-(-rows // height), -(-columns // width)):
            raise ValueError(f"{tuple(scales.shape)} scales for {rows} x {columns} in blocks of {height} x {width}")
        return CodedWeight(weight, scales.repeat_interleave(height, dim=0)[:rows].contiguous(), None, width)
    if scales.numel() == 1:
        return CodedWeight(weight, scales.view(1, 1).repeat(rows, 1), None, columns)
    group = _group(scales.view(rows, -1).shape[1], columns)
    return CodedWeight(weight, scales.view(rows, -1).contiguous(), None, group)


def _coded(codes: Tensor, scales: Tensor, zeros: Tensor, bits: int, groups: Tensor | None = None) -> CodedWeight:
    """Unsigned codes [n, k], scales and zeros [n, groups] -> the weight; `groups` [k] is the group of each column."""
    rows, columns = codes.shape
    if scales.shape[0] != rows or zeros.shape != scales.shape:
        shapes = tuple(scales.shape), tuple(zeros.shape)
        raise ValueError(f"scales and zero points of shapes {shapes[0]} and {shapes[1]} for a weight of {rows} rows")
    group, order = _group(scales.shape[1], columns), None
    if groups is not None and not torch.equal(groups.long(), torch.arange(columns) // group):
        order = groups.long().argsort(stable=True)
        if not torch.equal(groups.long()[order], torch.arange(columns) // group):
            raise ValueError(f"groups are not of {group} columns each")
        codes = codes[:, order]
    if bits == 4:
        if columns % BLOCK:
            raise ValueError(f"{columns} columns of 4-bit codes; supported: multiples of {BLOCK}")
        packed = pack_pairs(codes.contiguous())
    else:  # to signed ones
        packed, zeros = (codes.int() - 128).to(torch.int8), zeros.int() - 128
    return CodedWeight(packed.contiguous(), scales.float().contiguous(), zeros.float().contiguous(), group, order)


def _group(count: int, columns: int) -> int:
    group = columns // count
    if group * count != columns or (count > 1 and group % BLOCK):
        raise ValueError(f"{count} groups of {columns} columns; supported: one, or groups of a multiple of {BLOCK}")
    return group


def _unpack(words: Tensor, bits: int) -> Tensor:
    """Take int32 [n, m] apart, lowest bits first -> uint8 [n, m * 32 / bits]"""
    if words.dtype != torch.int32:
        raise ValueError(f"packed codes of {str(words.dtype).removeprefix('torch.')}, expected int32")
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes: Tensor = (words[:, :, None] >> shifts) & (2**bits - 1)
    return codes.to(torch.uint8).flatten(1)
