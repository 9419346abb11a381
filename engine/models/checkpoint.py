"""safetensors files, read tensor by tensor straight into the memory where the tensors will stay.

Reading instead of mapping: a mapped tensor that is then concatenated or converted is in memory twice, and a mapped
model runs from 4 KiB pages.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from engine.models.checkpoint_index import CheckpointError, TensorEntry, read_index

_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_ALL_DTYPES: Final = {
    **_DTYPES,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
}
_STAGING_BYTES: Final = 16 * 2**20


class Checkpoint(ExitStack):
    """The tensors of a model folder, open for reading. The files are closed on leaving.

    Raises CheckpointError for missing or damaged files.
    """

    def __init__(self, folder: Path, stem: str = "model") -> None:
        super().__init__()
        self.entries = read_index(folder, stem)
        self._files: dict[Path, FileIO] = {}

    def read_into(self, name: str, out: Tensor, dtypes: Mapping[str, torch.dtype] = _DTYPES) -> None:
        """Fill `out` (contiguous, of the tensor's shape) from the file; dtype and device may differ from the file's.

        Raises CheckpointError where the shapes differ, the dtype is none of `dtypes`, by default floating-point ones,
        or the file ends early.
        """
        entry = self.entries[name]
        if tuple(out.shape) != entry.shape:
            raise CheckpointError(f"{name} in {entry.path} has shape {entry.shape}, the model needs {tuple(out.shape)}")
        if entry.dtype not in dtypes:
            supported = ", ".join(dtypes)
            raise CheckpointError(f"{name} in {entry.path} has dtype {entry.dtype}; supported: {supported}")
        file = self._open(entry.path)
        file.seek(entry.offset)
        dtype, flat = dtypes[entry.dtype], out.view(-1)
        if dtype == out.dtype and out.device.type == "cpu":
            _read_exactly(file, flat, entry)
        else:
            for piece in torch.split(flat, _STAGING_BYTES // dtype.itemsize):
                staging = torch.empty(len(piece), dtype=dtype)
                _read_exactly(file, staging, entry)
                piece.copy_(staging)

    def read(self, name: str) -> Tensor:
        """Return a tensor as the file has it, small dtypes included. Raises CheckpointError for another dtype."""
        entry = self.entries[name]
        out = torch.empty(entry.shape, dtype=_ALL_DTYPES.get(entry.dtype))
        self.read_into(name, out, _ALL_DTYPES)
        return out

    def are_equal(self, one: str, other: str) -> bool:
        """Return whether two tensors agree in dtype, shape and every byte. Stops reading at the first difference."""
        first, second = self.entries[one], self.entries[other]
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return False
        for start in range(0, first.size_bytes, _STAGING_BYTES):
            size = min(_STAGING_BYTES, first.size_bytes - start)
            ours, theirs = (os.pread(self._open(e.path).fileno(), size, e.offset + start) for e in (first, second))
            if ours != theirs:
                return False
        return True

    def _open(self, path: Path) -> FileIO:
        if path not in self._files:
            self._files[path] = self.enter_context(FileIO(path))
        return self._files[path]


def _read_exactly(file: FileIO, out: Tensor, entry: TensorEntry) -> None:
    target = out.view(torch.uint8).numpy().data
    done = 0
    while done < len(target):
        count = file.readinto(target[done:])
        if not count:
            raise CheckpointError(f"{entry.path} ended {len(target) - done} bytes early")
        done += count
