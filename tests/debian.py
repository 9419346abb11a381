"""Programs of Debian's packages, unpacked into .cache/debian, not installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from filelock import FileLock

CACHE = Path(__file__).parents[1] / ".cache" / "debian"
TIMEOUT_S = 120.0


class Unavailable(Exception):
    """No such program can be had here; the words say why."""


def unpacked(*packages: str) -> Path:
    """Return the folder into which the packages are unpacked, as if it were the root: named by the first of them.

    Raises Unavailable without Debian's tools, and where they cannot fetch the packages.
    """
    folder = CACHE / packages[0]
    if folder.exists():
        return folder
    missing = [tool for tool in ("apt-get", "dpkg-deb") if shutil.which(tool) is None]
    if missing:
        raise Unavailable(f"{packages[0]} is taken from Debian's packages, and there is no {missing[0]} here")
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(CACHE / "lock"):  # so has apt-get, but does not wait
        if not folder.exists():
            _unpack(packages, folder)
    return folder


def _unpack(packages: Sequence[str], folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        downloads, root = Path(scratch, "debs"), Path(scratch, "root")
        downloads.mkdir()
        get = ["apt-get", "-qq", "-o", "APT::Sandbox::User=root"]
        if os.geteuid() == 0:
            _run([*get, "update"], downloads)
        _run([*get, "download", *packages], downloads)
        for package in downloads.glob("*.deb"):
            _run(["dpkg-deb", "--extract", str(package), str(root)], downloads)
        root.rename(folder)


def program_or_skip(package: str, path: str) -> Path:
    """Return a program, installed or of one package by its path; skip the test with the reason where there is none."""
    if (installed := shutil.which(Path(path).name)) is not None:
        return Path(installed)
    try:
        return unpacked(package) / path
    except Unavailable as reason:
        pytest.skip(str(reason))


def _run(command: Sequence[str], folder: Path) -> None:
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{' '.join(command)} took longer than {TIMEOUT_S:.0f} s") from error
    except subprocess.CalledProcessError as error:
        raise Unavailable(f"{' '.join(command)} failed: {error.stderr.strip()}") from error
