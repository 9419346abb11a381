"""`python -m tools.gpu_check.environment`: processors, driver and versions, the first lines of `make gpu-check`."""

from __future__ import annotations

import platform
import re
import sys
from importlib import metadata
from pathlib import Path

import torch

from launch.cluster.shares import available_cores

_SHOWN = ("torch", "torchvision", "transformers", "triton", "flashinfer-python", "numpy", "triptych")
_REQUIRED = ("transformers", "flashinfer-python")
"""Packages of the check beside torch."""


def main() -> None:
    """Print the environment, or the missing parts with exit status 1."""
    if absent := missing():
        sys.exit(f"missing: {', '.join(absent)}")
    print(in_words())


def missing() -> list[str]:
    """Parts of a GPU environment that are absent here, each with the remedy."""
    absent = [f"{name} (pip install -e '.[worker,broker,cuda,test]')" for name in _REQUIRED if _version(name) is None]
    if not torch.cuda.is_available():
        absent.append("a CUDA device that torch finds (see `nvidia-smi`, and for a CUDA build of torch)")
    return absent


def in_words() -> str:
    """One line: cores, memory, GPU, driver, CUDA, Python and versions of the packages in use."""
    model = _found(r"model name\s*: (.*)", "/proc/cpuinfo") or platform.machine()
    memory = int(_found(r"MemTotal:\s*(\d+)", "/proc/meminfo") or 0) / 2**20
    facts = [f"{available_cores()} cores of {model}", f"{memory:.0f} GiB", *_gpu()]
    versions = [f"{name} {version}" for name in _SHOWN if (version := _version(name))]
    return ", ".join([*facts, f"Python {platform.python_version()}", *versions])


def _gpu() -> list[str]:
    if not torch.cuda.is_available():
        return ["no GPU"]
    free, total = torch.cuda.mem_get_info()
    memory = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    driver = _found(r"\s(\d+\.\d+(?:\.\d+)?)\s", "/proc/driver/nvidia/version") or "unknown"
    return [torch.cuda.get_device_name(), memory, f"driver {driver}", f"CUDA {torch.version.cuda}"]


def _found(pattern: str, path: str) -> str | None:
    """Return the first group of a match in a file of the system."""
    file = Path(path)
    match = re.search(pattern, file.read_text()) if file.is_file() else None
    return match[1] if match else None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
