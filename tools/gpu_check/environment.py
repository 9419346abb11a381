"""What a machine has for the GPU check: device, driver, versions, and which requirements nothing meets."""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tools.gpu_check.layout import THERE, There, normal_name, requirements

_GIB = 2**30
_SHOWN = ("torch", "torchvision", "transformers", "triton", "flashinfer-python", "numpy")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the facts and write them to a file; returns 1 where the check cannot work here."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_check.environment", description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file for the facts")
    options = parser.parse_args(arguments)
    facts = gather()
    report = {"found": in_words(facts), "facts": facts}
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1))
    print(report["found"])
    return int(bool(facts["missing"]) or facts["gpu"] is None)


def gather() -> dict[str, Any]:
    """Facts as plain values; `gpu` is None without a CUDA device, `missing` names unmet requirements."""
    versions = {name: _version(name) for name in _SHOWN}
    return {
        "python": platform.python_version(),
        "versions": versions,
        "gpu": _gpu() if versions["torch"] else None,
        "missing": [*missing(requirements(), There.read(THERE).left_out), *missing_for_references()],
    }


def in_words(facts: dict[str, Any]) -> str:
    """One line: what there is, or what is missing and what to do."""
    if facts["missing"]:
        return f"missing: {', '.join(facts['missing'])}; run `make gpu-carry` where there is an index, bring its folder"
    gpu = facts["gpu"]
    if gpu is None:
        return "torch finds no CUDA device: look at `nvidia-smi`, and for a CUDA build of torch"
    packages = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)
    memory = f"{gpu['free_bytes'] / _GIB:.1f} of {gpu['total_bytes'] / _GIB:.1f} GiB free"
    return f"{gpu['name']}, {memory}, driver {gpu['driver']}, CUDA {gpu['cuda']}, Python {facts['python']}, {packages}"


def missing(wanted: Iterable[str], left_out: frozenset[str] = frozenset()) -> list[str]:
    """Requirements that no installed package meets, those of the packages themselves included, with who asks."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return ["packaging (to look for the others, there is none)"]
    found, seen = [], set()
    queue = [(Requirement(line), "triptych", "") for line in wanted]
    while queue:
        requirement, asker, extra = queue.pop()
        name = normal_name(requirement.name)
        needless = requirement.marker is not None and not requirement.marker.evaluate({"extra": extra})
        if needless or name in left_out or (name, str(requirement.specifier)) in seen:
            continue
        seen.add((name, str(requirement.specifier)))
        version = _version(name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{name}{requirement.specifier} (for {asker}, there is {version or 'none'})")
            continue
        for line in metadata.requires(name) or ():
            queue += [(Requirement(line), name, one) for one in ("", *requirement.extras)]
    return sorted(set(found))


def missing_for_references() -> list[str]:
    """torchvision, where transformers makes no processors of pictures without it, as 5.17 does not even for PIL alone:
    references to compare with need them, and no package asks for it."""
    if _version("transformers") is None or _version("torchvision") is not None:
        return []
    try:
        import transformers

        _ = transformers.AutoImageProcessor.from_pretrained
    except ImportError as error:
        if "torchvision" in str(error).lower():
            return ["torchvision (for transformers' processors of pictures: no folder brings the one for this torch)"]
    return []


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _gpu() -> dict[str, Any] | None:
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return {
        "name": torch.cuda.get_device_name(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "free_bytes": free,
        "total_bytes": total,
    }


def _driver() -> str:
    path = Path("/proc/driver/nvidia/version")
    match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", path.read_text()) if path.is_file() else None
    return match[1] if match else "unknown"


if __name__ == "__main__":
    sys.exit(main())
