"""What is carried to a machine without an index, and where it lies; needs the standard library alone."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
THERE: Final = Path(__file__).with_name("there.txt")
WORKSPACE: Final = ROOT / "build" / "flashinfer"
"""FLASHINFER_WORKSPACE_BASE of `python -m tools.gpu_check.kernels` for kernels to be carried."""
EXTRAS: Final = ("worker", "broker", "cuda")
CHECKING: Final = ("filelock", "hypothesis", "msgpack", "openai", "pytest", "pytest-asyncio", "pytest-timeout")
"""Of the extra `test`: what the checks on a GPU import."""
_NAME: Final = re.compile(r"[A-Za-z0-9._-]+")
_THERE: Final = re.compile(r"(-?)([A-Za-z0-9._-]+)(?:==|>=)([0-9.]+)")


@dataclass(frozen=True)
class Carried:
    """The folders of one carried folder; they need not exist."""

    folder: Path

    @property
    def wheels(self) -> Path:
        return self.folder / "wheels"

    @property
    def kernels(self) -> Path:
        """FlashInfer's libraries that were built ahead, NAME/NAME.so: packed, they have half their size."""
        return self.folder / "kernels.tar.xz"

    @property
    def site(self) -> Path:
        """Where the wheels are installed on the machine; never carried."""
        return self.folder / "site"

    @property
    def workspace(self) -> Path:
        """Where FlashInfer compiles on the machine what was not built ahead. Beside the folder, which the next journey
        replaces."""
        return self.folder.with_name(f"{self.folder.name}-workspace")


def requirements() -> list[str]:
    """What the check needs, as pyproject.toml says it: `name>=version`, unresolved."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    checking = [line for line in extras["test"] if normal_name(line) in CHECKING]
    return [*project["dependencies"], *(line for name in EXTRAS for line in extras[name]), *checking]


@dataclass(frozen=True)
class There:
    """What a machine has: `versions` by normalised name. `left_out` of them are not there, and not brought either."""

    versions: dict[str, str]
    left_out: frozenset[str]

    @classmethod
    def read(cls, path: Path) -> There:
        """Raises ValueError naming a line that says nothing of this kind."""
        versions, left_out = {}, set()
        for line in path.read_text().splitlines():
            entry = line.partition("#")[0].strip()
            if not entry:
                continue
            match = _THERE.fullmatch(entry)
            if match is None:
                raise ValueError(f"{path}: {entry!r} is neither name==version nor name>=version")
            name = normal_name(match[2])
            versions[name] = match[3]
            if match[1]:
                left_out.add(name)
        return cls(versions, frozenset(left_out))


def normal_name(requirement: str) -> str:
    """The name that a requirement or a package has in an index: lower case, with hyphens."""
    match = _NAME.match(requirement)
    return re.sub(r"[-_.]+", "-", match[0]).lower() if match else ""
