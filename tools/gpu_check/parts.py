"""Checkpoints on their way to a machine that takes little at a time: packed, cut into parts, joined again there.

    FOLDER/1/smollm2.tar.xz.0      each numbered folder is for one journey, and not larger than a limit
    FOLDER/2/smollm2.tar.xz.1
    FOLDER/2/whisper.tar.xz.0
    FOLDER/*/parts.json            the same in each: the parts of every checkpoint in their order, with their hashes
    FOLDER/joined/smollm2/         what comes of them there

Packed, because weights that were stored with fewer bits, or float32 ones that were float16, shrink by half and more.
Standard library alone.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import shutil
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

LIMIT_BYTES: Final = 40 * 2**20
_LISTED: Final = "parts.json"
_PRESET: Final = 1
"""Of xz: a minute for a small checkpoint; higher ones take much longer for little."""
_CHUNK_BYTES: Final = 2**20
Listed = dict[str, list[tuple[str, str]]]
"""By checkpoint its parts: paths below the folder, and SHA-256."""


def cut(checkpoints: Iterable[Path], folder: Path, limit_bytes: int = LIMIT_BYTES) -> list[Path]:
    """Pack checkpoints and cut them into numbered folders, which are returned; what was in `folder` is gone.

    Raises ValueError for a folder that is no checkpoint, and where two have the same name.
    """
    shutil.rmtree(folder, ignore_errors=True)
    writer, listed = _Writer(folder, limit_bytes), Listed()
    for checkpoint in checkpoints:
        if not (checkpoint / "config.json").is_file():
            raise ValueError(f"{checkpoint} has no config.json: it is no checkpoint")
        name = checkpoint.resolve().name
        if name in listed:
            raise ValueError(f"two checkpoints are named {name}; rename the folder of one of them")
        listed[name] = writer.write(name, checkpoint)
    for journey in writer.journeys:
        (journey / _LISTED).write_text(json.dumps(listed))
    return writer.journeys


def join(folder: Path) -> Path:
    """The folder of whole checkpoints: `folder` itself where it is one, else what its parts give, made once.

    Raises ValueError naming parts that are not there or have other bytes than were sent.
    """
    lists = sorted(folder.glob(f"*/{_LISTED}"))
    if not lists:
        return folder
    listed: Listed = json.loads(lists[-1].read_text())
    whole = folder / "joined"
    for name, parts in listed.items():
        if not (whole / name).is_dir():
            _unpack([(folder / path, digest) for path, digest in parts], whole, name)
    return whole


class _Writer:
    """Fills one numbered folder after the other."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder, self._limit_bytes = folder, limit_bytes
        self._left_bytes = 0
        self.journeys: list[Path] = []

    def write(self, name: str, checkpoint: Path) -> list[tuple[str, str]]:
        packed = self._folder / f"{name}.tar.xz"
        self._folder.mkdir(parents=True, exist_ok=True)
        with lzma.open(packed, "wb", preset=_PRESET) as packing, tarfile.open(fileobj=packing, mode="w|") as archive:
            for path in sorted(checkpoint.iterdir()):
                archive.add(path.resolve(), f"{name}/{path.name}")
        parts: list[tuple[str, str]] = []
        with packed.open("rb") as file:
            while file.peek(1):
                parts.append(self._write_part(f"{packed.name}.{len(parts)}", file))
        packed.unlink()
        return parts

    def _write_part(self, name: str, file: io.BufferedReader) -> tuple[str, str]:
        if self._left_bytes == 0:
            self.journeys.append(self._folder / str(len(self.journeys) + 1))
            self.journeys[-1].mkdir()
            self._left_bytes = self._limit_bytes
        data = file.read(self._left_bytes)
        self._left_bytes -= len(data)
        path = self.journeys[-1] / name
        path.write_bytes(data)
        return str(path.relative_to(self._folder)), hashlib.sha256(data).hexdigest()


def _unpack(parts: list[tuple[Path, str]], target: Path, name: str) -> None:
    """Unpack a checkpoint beside where it belongs and move it there whole."""
    missing = [str(path) for path, _ in parts if not path.is_file()]
    if missing:
        raise ValueError(f"parts of {name} are not here: {', '.join(missing)}; carry them first")
    for path, digest in parts:
        if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise ValueError(f"{path} has other bytes than were sent; carry it again")
    unfinished = target / f"{name}.part"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    with tarfile.open(fileobj=_Joined(_chunks(path for path, _ in parts)), mode="r|xz") as archive:
        archive.extractall(unfinished, filter="data")
    (unfinished / name).rename(target / name)
    unfinished.rmdir()


def _chunks(paths: Iterable[Path]) -> Iterator[bytes]:
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk


class _Joined(io.RawIOBase):
    """Chunks read as one file."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""

    def read(self, size: int = -1) -> bytes:
        while size < 0 or len(self._rest) < size:
            chunk = next(self._chunks, b"")
            if not chunk:
                break
            self._rest += chunk
        size = len(self._rest) if size < 0 else size
        data, self._rest = self._rest[:size], self._rest[size:]
        return data
