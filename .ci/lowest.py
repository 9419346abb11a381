"""Test with each declared dependency at its lowest declared version, in an environment of its own: are the bounds true?

Usage: lowest.py FOLDER CONSTRAINTS [PYTEST_ARGS…]. torch is the one exception: it has the version that CONSTRAINTS
name, as no index has CPU builds of all versions. Exits with 1 if a bound cannot be installed, or if a test fails.
"""

import re
import subprocess
import sys
import tomllib
import venv
from importlib.metadata import distributions
from pathlib import Path

EXTRAS = "worker,broker,test"
NOT_LOWEST = ("torch", "triptych")
BOUND = re.compile(r"(?P<name>[\w-]+)(\[.*?\])?>=(?P<lowest>[\d.]+)")
TESTED = [f"tests/{folder}" for folder in ("common", "broker", "proxy", "services", "launch", "engine")]
IN_PROCESS = "not (cluster or chaos or weights or slow)"


def declared() -> dict[str, str]:
    """Return the lower bound of each dependency that the tests install, by its name as packages spell it."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for name in EXTRAS.split(",") for line in extras[name])]
    found = filter(None, map(BOUND.match, lines))
    return {normal(match["name"]): match["lowest"] for match in found}


def normal(name: str) -> str:
    """Return a package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def install(folder: Path, constraints: str) -> None:
    """Make the environment anew; uv resolves to the lowest versions, which pip cannot."""
    venv.create(folder, clear=True, with_pip=True)
    python = str(folder / "bin" / "python")
    # Alone: uv keeps what it finds installed, and would not lower it.
    alone = ["--quiet", "--no-deps", "-c", constraints]
    subprocess.run([python, "-m", "pip", "install", *alone, "torch", "uv"], check=True)
    asked = subprocess.run([python, "-m", "pip", "freeze"], check=True, capture_output=True, text=True)
    torch = folder / "torch.txt"
    torch.write_text("".join(line for line in asked.stdout.splitlines(keepends=True) if line.startswith("torch==")))
    uv = [str(folder / "bin" / "uv"), "pip", "install", "--quiet", "--python", python, "--resolution", "lowest-direct"]
    subprocess.run([*uv, "-c", str(torch), f".[{EXTRAS}]"], check=True)
    # The tests import the tree they lie in.
    subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", "triptych"], check=True)


def untrue_bounds(folder: Path) -> list[str]:
    """Return a line for each dependency whose lowest version others forbid: its bound promises too much."""
    installed = {normal(d.name): d.version for d in distributions(path=[str(next(folder.glob("lib/*/site-packages")))])}
    lines = []
    for name, lowest in declared().items():
        version = installed.get(name)
        same = version is not None and (version + ".").startswith(lowest + ".")
        if not same and name not in NOT_LOWEST:
            lines.append(f"{name}>={lowest}: {version} is the lowest that installs beside the others")
    return lines


def main(where: str, constraints: str, *arguments: str) -> int:
    """Install, compare and test."""
    folder = Path(where).resolve()
    install(folder, constraints)
    untrue = untrue_bounds(folder)
    print(*untrue, sep="\n", file=sys.stderr)
    command = [str(folder / "bin" / "python"), "-m", "pytest", "-n", "2", "--dist", "loadscope", "-m", IN_PROCESS]
    tests = subprocess.run([*command, *(arguments or TESTED)], check=False)
    return 1 if untrue else tests.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
