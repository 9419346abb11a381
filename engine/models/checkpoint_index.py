"""The tensors of a model folder, from the headers of its safetensors files: names, shapes, places. No torch."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from common.errors import TriptychError

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


def read_index(folder: Path, stem: str = "model") -> dict[str, TensorEntry]:
    """Return the tensors of `model.safetensors`, or of the shards that `model.safetensors.index.json` names.

    Raises CheckpointError for missing, damaged or cut files.
    """
    entries: dict[str, TensorEntry] = {}
    for path in _weight_files(folder, stem):
        entries |= _read_header(path)
    return entries


def has_tensor(folder: Path, name: str, *, default: bool) -> bool:
    """Return whether the checkpoint holds a tensor; `default` without a readable one: loading says why, if it must."""
    try:
        return name in read_index(folder)
    except CheckpointError:
        return default


def _weight_files(folder: Path, stem: str) -> list[Path]:
    index, single = folder / f"{stem}.safetensors.index.json", folder / f"{stem}.safetensors"
    if single.is_file():
        return [single]
    if not index.is_file():
        found = ", ".join(sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".gguf", ".pt")))
        message = f"{folder} has neither {single.name} nor {index.name}: save the model as unquantised safetensors"
        raise CheckpointError(f"{message}; it has {found}" if found else message)
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not an index of shards: {error!r}") from error
    missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{index} names shards that are not in its folder: {', '.join(missing)}")
    return [folder / name for name in names]


def _read_header(path: Path) -> dict[str, TensorEntry]:
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
    data, entries = 8 + header_size, {}
    try:
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            if not 0 <= begin <= end <= size - data:
                raise CheckpointError(f"{path} is cut off: {name} ends at byte {data + end} of {size}")
            dtype, shape = entry["dtype"], tuple(entry["shape"])
            bits = re.search(r"\d+", dtype)  # of a value: F32, BF16, F8_E4M3; not of BOOL
            needed = end - begin if bits is None else math.prod(shape) * int(bits[0]) // 8
            if end - begin != needed:
                raise CheckpointError(f"{path} is damaged: {name} has {end - begin} bytes, its shape needs {needed}")
            entries[name] = TensorEntry(path, dtype, shape, data + begin, end - begin)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: its header has wrong entries ({error!r})") from error
    return entries
