"""What pip needs for the extras of a project, read from its pyproject.toml: for image layers that outlive the code.

Usage: requirements.py PYPROJECT [--only] [EXTRA…]      (--only: the extras without the base; the "extra" build-system
is what building the project needs)
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: list[str], *, base: bool = True) -> list[str]:
    """Requirement lines of the base (unless `base` is false) and the extras. Raises KeyError for an unknown extra."""
    content = tomllib.loads(pyproject.read_text())
    project = content["project"]
    groups = {**project["optional-dependencies"], "build-system": content["build-system"]["requires"]}
    return [*(project["dependencies"] if base else ()), *(line for extra in extras for line in groups[extra])]


if __name__ == "__main__":
    path, *names = sys.argv[1:]
    print("\n".join(requirements(Path(path), [n for n in names if n != "--only"], base="--only" not in names)))
