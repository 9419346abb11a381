"""What `make` relies on before anything is installed: finding a Python, and keeping CUDA packages away."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def find_python(named: str, path: str) -> subprocess.CompletedProcess[str]:
    command = ["/bin/sh", str(ROOT / ".ci" / "find_python"), named]
    return subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, timeout=60, check=False)


def fake_python(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_an_unsuitable_python_is_passed_over(tmp_path: Path) -> None:
    fake_python(tmp_path, "python3", "echo Python 3.9.2; exit 1")
    fake_python(tmp_path, "python3.12", "exit 0")
    found = find_python("python3", str(tmp_path))
    assert (found.returncode, found.stdout.strip()) == (0, str(tmp_path / "python3.12"))


def test_no_suitable_python_is_said_clearly(tmp_path: Path) -> None:
    fake_python(tmp_path, "python3", "[ $1 = --version ] && echo Python 3.9.2; exit 1")
    found = find_python("python3", str(tmp_path))
    assert (found.returncode, found.stdout) == (1, "")
    assert "needs Python 3.11 to 3.14 with its venv module; python3 is: Python 3.9.2" in found.stderr


def make_torch_wheel(folder: Path, requirement: str) -> None:
    """An index, as a folder, whose torch is nothing but metadata."""
    metadata = f"Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\nRequires-Dist: {requirement}\n"
    with zipfile.ZipFile(folder / "torch-2.13.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("torch-2.13.0.dist-info/METADATA", metadata)
        wheel.writestr("torch-2.13.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("torch-2.13.0.dist-info/RECORD", "")


@pytest.mark.skipif(sys.platform != "linux", reason="CUDA builds come to Linux only")
@pytest.mark.parametrize(
    ("requirement", "code"),
    [
        ("sympy", 0),
        ("nvidia-cublas==13.1.0.3", 1),
        ("nvidia-cublas==13.1.0.3; platform_system == 'Linux'", 1),
        ("nvidia-cublas==13.1.0.3; platform_system == 'Windows'", 0),
        ("cuda-bindings>=13; extra == 'cuda'", 0),
    ],
)
def test_a_cuda_build_is_noticed_before_it_is_downloaded(tmp_path: Path, requirement: str, code: int) -> None:
    make_torch_wheel(tmp_path, requirement)
    command = [sys.executable, str(ROOT / ".ci" / "check_torch.py"), str(ROOT / "constraints-cpu.txt")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    check = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert check.returncode == code, check.stderr
    assert ("PIP_EXTRA_INDEX_URL" in check.stderr) == bool(code)


def test_building_never_needs_torch_and_the_proxy_never_installs_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = project["build-system"]["requires"] + project["project"]["dependencies"]
    assert not [name for name in needed if name.startswith(("torch", "transformers"))]


def test_a_release_is_built_and_checked_under_the_version_of_the_project() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    command = ["make", "--dry-run", "--no-print-directory", "dist"]
    script = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    assert f".ci/check_wheel.sh dist/triptych-{version}-py3-none-any.whl {version}" in script
    assert f".ci/images.sh {version} dist" in script
