"""Checkpoints of quantised weights, packed bit by bit with numpy from the formats' documentation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Tensors = dict[str, Array]
GROUP = 32
_BYTES = np.arange(256)
_EXPONENTS, _FRACTIONS = _BYTES >> 3 & 15, _BYTES & 7
E4M3 = (
    np.where(_BYTES < 128, 1, -1)
    * np.where(_EXPONENTS > 0, (1 + _FRACTIONS / 8) * 2.0 ** (_EXPONENTS - 7), _FRACTIONS / 8 * 2.0**-6)
).astype(np.float32)
"""The value of each byte (Micikevicius et al., 2022), but of the two bytes for NaN."""


def write_safetensors(path: Path, tensors: Tensors) -> None:
    names = {"float32": "F32", "float16": "F16", "int32": "I32", "int64": "I64", "uint8": "F8_E4M3"}
    header: dict[str, Any] = {}
    data = b""
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": names[array.dtype.name], "shape": list(array.shape), "data_offsets": offsets}
        data += raw
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + data)


def read_safetensors(path: Path) -> Tensors:
    """The float32 tensors of a file."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    found: Tensors = {}
    for name, entry in json.loads(raw[8 : 8 + size]).items():
        if name != "__metadata__":
            begin, end = (8 + size + at for at in entry["data_offsets"])
            found[name] = np.frombuffer(raw[begin:end], np.float32).reshape(entry["shape"]).copy()
    return found


def words(codes: Array, order: tuple[int, ...]) -> Array:
    """Codes [n, m * len(order)] -> int32 [n, m]: place i of a word holds code order[i] of its codes."""
    bits = 32 // len(order)
    out = np.zeros((codes.shape[0], codes.shape[1] // len(order)), np.uint32)
    for place, which in enumerate(order):
        out |= codes[:, which :: len(order)].astype(np.uint32) << np.uint32(place * bits)
    return out.view(np.int32)


def in_order(bits: int) -> tuple[int, ...]:
    return tuple(range(32 // bits))


def groups_of(weight: Array, bits: int, column_group: Array) -> tuple[Array, Array, Array]:
    """Return codes [n, k], scales float16 [n, groups] and zero points [n, groups], for groups given by column."""
    count, largest = int(column_group.max()) + 1, 2**bits - 1
    scales, zeros = np.zeros((len(weight), count), np.float16), np.zeros((len(weight), count), np.int64)
    for group in range(count):
        part = weight[:, column_group == group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        scales[:, group] = ((high - low) / largest).astype(np.float16)
        zeros[:, group] = np.clip(np.rint(-low / scales[:, group].astype(np.float32)), 0, largest)
    wide, offset = scales.astype(np.float32)[:, column_group], zeros[:, column_group]
    return np.clip(np.rint(weight / wide) + offset, 0, largest).astype(np.int64), scales, zeros


def values_of(codes: Array, scales: Array, zeros: Array, column_group: Array) -> Array:
    return ((codes - zeros[:, column_group]) * scales.astype(np.float32)[:, column_group]).astype(np.float32)


def e4m3(values: Array) -> Array:
    """Return the bytes of the nearest values."""
    usable = np.array([byte for byte in _BYTES if byte & 127 != 127])
    ordered = usable[np.argsort(E4M3[usable], kind="stable")]
    middles = (E4M3[ordered][1:] + E4M3[ordered][:-1]) / 2
    return ordered[np.searchsorted(middles, values)].astype(np.uint8)


def awq(base: str, weight: Array) -> tuple[Tensors, Array]:
    groups = np.arange(weight.shape[1]) // GROUP
    codes, scales, zeros = groups_of(weight, 4, groups)
    interleaved = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {"qweight": words(codes.T, interleaved), "qzeros": words(zeros.T, interleaved), "scales": scales.T}
    return _named(base, tensors), values_of(codes, scales, zeros, groups)


def gptq(base: str, weight: Array, bits: int = 4, *, v2: bool = False, shuffled: bool = False) -> tuple[Tensors, Array]:
    groups = np.arange(weight.shape[1]) // GROUP
    if shuffled:
        groups = np.random.default_rng(len(weight)).permutation(groups)
    codes, scales, zeros = groups_of(weight, bits, groups)
    stored = zeros if v2 else (zeros - 1) % 2**bits
    tensors = {
        "qweight": words(codes, in_order(bits)).T,
        "qzeros": words(stored.T, in_order(bits)),
        "scales": scales.T,
        "g_idx": groups.astype(np.int32),
    }
    return _named(base, tensors), values_of(codes, scales, zeros, groups)


def fp8_blocks(base: str, weight: Array, size: int) -> tuple[Tensors, Array]:
    rows, columns = weight.shape
    scales = np.zeros((-(-rows // size), -(-columns // size)), np.float32)
    wide = np.zeros_like(weight)
    for i, j in np.ndindex(*scales.shape):
        place = np.s_[i * size : (i + 1) * size, j * size : (j + 1) * size]
        wide[place] = scales[i, j] = np.abs(weight[place]).max() / 448
    codes = e4m3(weight / wide)
    return _named(base, {"weight": codes, "weight_scale_inv": scales}), E4M3[codes] * wide


def fp8(base: str, weight: Array, *, per_row: bool) -> tuple[Tensors, Array]:
    scales = (np.abs(weight).max(1, keepdims=True) if per_row else np.abs(weight).max()[None]) / np.float32(448)
    codes = e4m3(weight / scales)
    return _named(base, {"weight": codes, "weight_scale": scales}), E4M3[codes] * scales


def packed(base: str, weight: Array, bits: int, *, symmetric: bool = True) -> tuple[Tensors, Array]:
    """compressed-tensors' pack-quantized: signed codes, moved to begin at zero, and zero points beside them."""
    groups, half = np.arange(weight.shape[1]) // GROUP, 2 ** (bits - 1)
    codes, scales, zeros = groups_of(weight, bits, groups)
    if symmetric:
        scales = (np.abs(weight).reshape(len(weight), -1, GROUP).max(2) / (half - 1)).astype(np.float16)
        signed = np.rint(weight / scales.astype(np.float32)[:, groups])
        zeros = np.full_like(zeros, half)
        codes = (np.clip(signed, -half, half - 1) + half).astype(np.int64)
    tensors = {
        "weight_packed": words(codes, in_order(bits)),
        "weight_scale": scales,
        "weight_shape": np.array(weight.shape, np.int64),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(zeros.T, in_order(bits)).T
    return _named(base, tensors), values_of(codes, scales, zeros, groups)


def packed_with_unused_groups(base: str, weight: Array) -> tuple[Tensors, Array]:
    tensors, values = packed(base, weight, bits=4)
    return {**tensors, f"{base}.weight_g_idx": np.full(weight.shape[1], -1, np.int32)}, values


def packed_with_one_scale(base: str, weight: Array) -> tuple[Tensors, Array]:
    scale = (np.abs(weight).max()[None] / 7).astype(np.float32)
    codes = np.clip(np.rint(weight / scale) + 8, 0, 15).astype(np.int64)
    shape = np.array(weight.shape, np.int64)
    tensors = {"weight_packed": words(codes, in_order(4)), "weight_scale": scale, "weight_shape": shape}
    return _named(base, tensors), ((codes - 8) * scale).astype(np.float32)


def _named(base: str, tensors: Tensors) -> Tensors:
    return {f"{base}.{role}": array for role, array in tensors.items()}


def quantise_folder(
    source: Path,
    folder: Path,
    config: dict[str, Any],
    pack: Callable[[str, Array], tuple[Tensors, Array]],
    leave: tuple[str, ...],
) -> Path:
    """Write two folders of a model beside each other: quantised, and with the values that the codes stand for.

    Layers whose name contains one of `leave` stay plain. Return the second.
    """
    exact = folder.with_name(f"{folder.name}-exact")
    tensors, values = {}, {}
    for name, array in read_safetensors(source / "model.safetensors").items():
        base = name.removesuffix(".weight")
        if name.endswith("_proj.weight") and not any(part in name for part in leave):
            coded, values[name] = pack(base, array)
            tensors |= coded
        else:
            tensors[name] = values[name] = array
    for place, content, extra in ((folder, tensors, {"quantization_config": config}), (exact, values, {})):
        place.mkdir(parents=True)
        for path in source.iterdir():
            if path.suffix != ".safetensors":
                (place / path.name).write_bytes(path.read_bytes())
        (place / "config.json").write_text(json.dumps({**json.loads((source / "config.json").read_text()), **extra}))
        write_safetensors(place / "model.safetensors", content)
    return exact
