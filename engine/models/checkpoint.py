"""safetensors files, read tensor by tensor straight into the memory where the tensors will stay.

Reading instead of mapping: a mapped tensor that is then concatenated or converted is in memory twice, and a mapped
model runs from 4 KiB pages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch
from torch import Tensor

from common.errors import TriptychError

_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_STAGING_BYTES: Final = 16 * 2**20
_MAX_HEADER_BYTES: Final = 100 * 2**20


class CheckpointError(TriptychError):
    """The weights of a model folder are missing, damaged or do not fit the configuration."""

    def __init__(self, message: str) -> None:
        super().__init__("model_not_found", message, "model")


@dataclass(frozen=True)
class TensorEntry:
    """Location of a tensor: `offset` and `size_bytes` refer to the file at `path`. `dtype` is safetensors' name."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


class Checkpoint:
    """The tensors of a model folder: `model.safetensors`, or the shards named by the index.

    A context manager: the files are closed on leaving. Raises CheckpointError for missing or damaged files.
    """

    def __init__(self, folder: Path) -> None:
        self.entries: dict[str, TensorEntry] = {}
        self.read_bytes = 0
        self._files: dict[Path, FileIO] = {}
        for path in _weight_files(folder):
            self.entries.update(_read_header(path))

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def read_into(self, name: str, out: Tensor) -> None:
        """Fill `out` (contiguous, of the tensor's shape) from the file; dtype and device may differ from the file's.

        Raises CheckpointError where the shapes differ, the dtype is not a floating-point one, or the file ends early.
        """
        entry = self.entries[name]
        if tuple(out.shape) != entry.shape:
            raise CheckpointError(f"{name} in {entry.path} has shape {entry.shape}, the model needs {tuple(out.shape)}")
        if entry.dtype not in _DTYPES:
            supported = ", ".join(_DTYPES)
            raise CheckpointError(f"{name} in {entry.path} has dtype {entry.dtype}; supported: {supported}")
        file = self._open(entry.path)
        file.seek(entry.offset)
        dtype, flat = _DTYPES[entry.dtype], out.view(-1)
        if dtype == out.dtype and out.device.type == "cpu":
            _read_exactly(file, flat, entry)
        else:
            for piece in _pieces(flat, dtype):
                staging = torch.empty(len(piece), dtype=dtype)
                _read_exactly(file, staging, entry)
                piece.copy_(staging)
        self.read_bytes += entry.size_bytes

    def _open(self, path: Path) -> FileIO:
        if path not in self._files:
            self._files[path] = FileIO(path)
        return self._files[path]


def _weight_files(folder: Path) -> list[Path]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.is_file():
        return [single]
    if not index.is_file():
        found = ", ".join(sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".gguf", ".pt")))
        message = f"{folder} has neither {single.name} nor {index.name}: save the model as unquantised safetensors"
        raise CheckpointError(f"{message}; it has {found}" if found else message)
    names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{index} names shards that are not in its folder: {', '.join(missing)}")
    return [folder / name for name in names]


def _read_header(path: Path) -> Iterator[tuple[str, TensorEntry]]:
    """Return the entries of a file. The format: u64 header size, JSON header, data; offsets count from the data."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        if size < 8 or header_size > min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(f"{path} ({size} bytes) is not a safetensors file: header of {header_size} bytes")
        try:
            header: dict[str, Any] = json.loads(file.read(header_size))
        except ValueError as error:
            raise CheckpointError(f"{path} is not a safetensors file: its header is not JSON ({error})") from error
    header.pop("__metadata__", None)
    data = 8 + header_size
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if not 0 <= begin <= end <= size - data:
            raise CheckpointError(f"{path} is cut off: {name} ends at byte {data + end} of {size}")
        yield name, TensorEntry(path, entry["dtype"], tuple(entry["shape"]), data + begin, end - begin)


def _read_exactly(file: FileIO, out: Tensor, entry: TensorEntry) -> None:
    target = out.view(torch.uint8).numpy().data
    done = 0
    while done < len(target):
        count = file.readinto(target[done:])
        if not count:
            raise CheckpointError(f"{entry.path} ended {len(target) - done} bytes early")
        done += count


def _pieces(flat: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return torch.split(flat, _STAGING_BYTES // dtype.itemsize)
