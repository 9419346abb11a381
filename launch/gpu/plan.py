"""The stages of the GPU check, in their order: what decides first, the benchmarks last. Standard library alone."""

from __future__ import annotations

import shutil
import sys
from typing import Final

from launch.gpu.stages import REPORT, Stage, read_json, read_junit

_PYTEST: Final = (sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={REPORT}")
_SANITIZER: Final = "compute-sanitizer"
_KERNELS: Final = ("tests/gpu/test_kernels.py",)


def _tests(name: str, *words: str, limit_s: float) -> Stage:
    return Stage(name, (*_PYTEST, *words), limit_s, read_junit)


def _benchmark(name: str, limit_s: float) -> Stage:
    command = (sys.executable, "-m", "launch.gpu.bench", name, "--out", REPORT)
    return Stage(f"bench-{name}", command, limit_s, read_json, decides=False)


def _sanitized(name: str, *words: str, limit_s: float) -> Stage:
    there = shutil.which(_SANITIZER)
    command = (there or _SANITIZER, "--tool", "memcheck", "--target-processes", "all", "--error-exitcode", "86")
    missing = None if there else f"{_SANITIZER} is not on the PATH: it comes with the CUDA toolkit"
    return Stage(name, (*command, *_PYTEST, *words), limit_s, read_junit, missing=missing)


STAGES: Final = (
    Stage("environment", (sys.executable, "-m", "launch.gpu.environment", "--out", REPORT), 60, read_json),
    _tests("attention", "tests/gpu/test_attention.py", *_KERNELS, limit_s=240),
    _tests("runner", "tests/engine", limit_s=120),
    _tests("engine", "tests/gpu/test_engine.py", limit_s=150),
    _tests("cluster", "tests/gpu/test_cluster.py", limit_s=180),
    _tests("transports", "tests/broker", "tests/services", limit_s=90),
    _sanitized("sanitizer", *_KERNELS, limit_s=90),
    _benchmark("decode", 120),
    _benchmark("prefill", 60),
    _benchmark("cross", 90),
    _benchmark("cross_plan", 60),
    _benchmark("encoder", 60),
    _benchmark("handoff", 60),
    _benchmark("serving", 150),
    _benchmark("batching", 90),
)
