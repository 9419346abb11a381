"""Reader of CTranslate2's `model.bin`: a flat list of named tensors.

u32 version | str spec | u32 revision | u32 count
count x:  str name | u8 rank | rank x u32 dimension | u8 dtype | u32 byte count | data
u32 aliases |  aliases x: str alias | str target          (version 3 and later)
str = u16 length, counting a final NUL | bytes
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
_DTYPES: Final[dict[int, str]] = {0: "<f4", 1: "i1", 2: "<i2", 3: "<i4", 4: "<f2"}


class FormatError(ValueError):
    """The file is not a CTranslate2 model, or ends too early."""


@dataclass(frozen=True)
class Ct2Model:
    """The tensors of one file by name; aliases are resolved."""

    spec: str
    tensors: dict[str, Array]

    def float(self, name: str) -> npt.NDArray[np.float16 | np.float32]:
        """A weight in floating point: int8 ones are stored as `weight * scale`, one scale per row."""
        tensor = self.tensors[name]
        if tensor.dtype.kind == "f":
            return tensor  # type: ignore[return-value]
        scale = np.asarray(self.tensors[name + "_scale"], dtype=np.float32)
        return (tensor.astype(np.float32) / scale.reshape(-1, *[1] * (tensor.ndim - 1))).astype(np.float32)


class _Cursor:
    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.position = 0

    def take(self, size: int) -> memoryview:
        if self.position + size > len(self._data):
            raise FormatError(f"ends at byte {len(self._data)}, expected {size} more after byte {self.position}")
        self.position += size
        return self._data[self.position - size : self.position]

    def integer(self, code: str) -> int:
        (value,) = struct.unpack("<" + code, self.take(struct.calcsize(code)))
        return int(value)

    def string(self) -> str:
        return bytes(self.take(self.integer("H"))).rstrip(b"\0").decode()


def read_ct2(path: Path) -> Ct2Model:
    """Read a model file. The tensors are views of its bytes. Raises FormatError."""
    cursor = _Cursor(memoryview(path.read_bytes()))
    version = cursor.integer("I")
    if not 2 <= version <= 6:
        raise FormatError(f"{path} has format version {version}, supported are 2 to 6")
    spec, _revision = cursor.string(), cursor.integer("I")
    tensors = dict(_read_tensor(cursor) for _ in range(cursor.integer("I")))
    if version >= 3:
        for _ in range(cursor.integer("I")):
            alias, target = cursor.string(), cursor.string()
            tensors[alias] = tensors[target]
    return Ct2Model(spec, tensors)


def _read_tensor(cursor: _Cursor) -> tuple[str, Array]:
    name = cursor.string()
    shape = [cursor.integer("I") for _ in range(cursor.integer("B"))]
    dtype = cursor.integer("B")
    if dtype not in _DTYPES:
        raise FormatError(f"{name} has the unknown dtype {dtype}")
    data = cursor.take(cursor.integer("I"))
    return name, np.frombuffer(data, _DTYPES[dtype]).reshape(shape)
