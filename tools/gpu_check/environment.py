"""`python -m tools.gpu_check.environment`: device, driver and versions, the first lines of `make gpu-check`."""

from __future__ import annotations

import platform
import re
import sys
from importlib import metadata
from pathlib import Path

import torch

_GIB = 2**30
_SHOWN = ("torch", "torchvision", "transformers", "triton", "flashinfer-python", "numpy")
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
    """One line: GPU, memory, driver, CUDA, Python and versions of the packages in use."""
    facts = [*_gpu(), f"Python {platform.python_version()}"]
    versions = [f"{name} {version}" for name in _SHOWN if (version := _version(name))]
    return ", ".join([*facts, *versions])


def _gpu() -> list[str]:
    if not torch.cuda.is_available():
        return ["no GPU"]
    free, total = torch.cuda.mem_get_info()
    memory = f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free"
    return [torch.cuda.get_device_name(), memory, f"driver {_driver()}", f"CUDA {torch.version.cuda}"]


def _driver() -> str:
    path = Path("/proc/driver/nvidia/version")
    match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", path.read_text()) if path.is_file() else None
    return match[1] if match else "unknown"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
