"""The stages of the GPU check: those that decide, which run side by side, then the benchmarks, one after the other.

What matters most comes first: the last benchmarks may find no time left. Standard library alone.

Estimates are those of an H100 with 16 cores and kernels that were built ahead, 8 s of each for the start of a process
with torch and a CUDA context. They are guesses until the check has run there; limits are what a stage may take at most.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from launch.gpu.stages import MODELS, REPORT, Stage, read_json, read_junit

BUDGET_S: Final = 540.0
"""For all stages: less than ten minutes, with what is left for the installation."""
LANES: Final = 4
"""So many stages that decide run at once: they look at results, not at times."""
OF_MODELS: Final = ("checkpoints", "bench-small")
"""Stages that want real checkpoints."""
_PYTEST: Final = (sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={REPORT}")
_SANITIZER: Final = "compute-sanitizer"
_KERNELS: Final = ("tests/gpu/test_kernels.py",)
_THREADS: Final = {"OMP_NUM_THREADS": "4"}
"""Side by side, none takes all cores for its reference on the CPU."""
_NO_CACHING: Final = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
"""Each tensor is an allocation of its own: within torch's large ones, memcheck would see no overrun."""
_MEMCHECK: Final = ("--target-processes", "all", "--report-api-errors", "no", "--error-exitcode", "86")
"""Calls that may fail, as those by which torch and Triton look what there is, are no errors of kernels."""
_REFUSALS: Final = ("Device not supported", "Internal Sanitizer Error", "Unable to find injection library")
"""What compute-sanitizer says on a device or driver that it does not know."""


def _tests(name: str, *words: str, expected_s: float, limit_s: float) -> Stage:
    missing = _without_models if name in OF_MODELS else _nothing
    return Stage(name, (*_PYTEST, *words), expected_s, limit_s, read_junit, missing=missing, variables=_THREADS)


def _benchmark(name: str, expected_s: float, limit_s: float) -> Stage:
    command = (sys.executable, "-m", "launch.gpu.bench", name, "--out", REPORT)
    missing = _without_models if f"bench-{name}" in OF_MODELS else _nothing
    return Stage(f"bench-{name}", command, expected_s, limit_s, read_json, decides=False, missing=missing)


def _sanitized(name: str, *words: str, expected_s: float, limit_s: float) -> Stage:
    """pytest under memcheck. Where the tool is not there, or refuses the device, that is said and does not decide."""
    folders = [os.environ.get("PATH", ""), f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin"]
    there = shutil.which(_SANITIZER, path=os.pathsep.join(folders))
    command = (there or _SANITIZER, "--tool", "memcheck", *_MEMCHECK)

    def missing(_: Mapping[str, str]) -> str | None:
        return None if there else f"{_SANITIZER} is neither on the PATH nor in CUDA_HOME (the CUDA toolkit has it)"

    return Stage(
        name,
        (*command, *_PYTEST, *words),
        expected_s,
        limit_s,
        read_junit,
        missing=missing,
        variables=_THREADS | _NO_CACHING,
        refusals=_REFUSALS,
    )


def _nothing(_: Mapping[str, str]) -> str | None:
    return None


def _without_models(variables: Mapping[str, str]) -> str | None:
    return None if MODELS in variables else "no checkpoints are given (--models)"


def expected_s(stages: Sequence[Stage]) -> float:
    """Of all of them, those that decide in LANES, in their order."""
    lanes = [0.0] * LANES
    for stage in stages:
        if stage.decides:
            lanes[lanes.index(min(lanes))] += stage.expected_s
    return max(lanes) + sum(stage.expected_s for stage in stages if not stage.decides)


STAGES: Final = (
    Stage("environment", (sys.executable, "-m", "launch.gpu.environment", "--out", REPORT), 8, 60, read_json),
    _tests("cluster", "tests/gpu/test_cluster.py", expected_s=190, limit_s=300),
    _tests("engine", "tests/gpu/test_engine.py", expected_s=210, limit_s=300),
    _sanitized("sanitizer", *_KERNELS, expected_s=60, limit_s=150),
    _tests("attention", "tests/gpu/test_attention.py", *_KERNELS, expected_s=35, limit_s=240),
    _tests("runner", "tests/engine", expected_s=25, limit_s=120),
    _tests("transports", "tests/broker", "tests/services", expected_s=25, limit_s=90),
    _tests("checkpoints", "tests/gpu/test_checkpoints.py", expected_s=90, limit_s=240),
    _benchmark("decode", 40, 90),
    _benchmark("prefill", 20, 60),
    _benchmark("cross", 45, 100),
    _benchmark("cross_plan", 15, 45),
    _benchmark("encoder", 25, 60),
    _benchmark("handoff", 75, 150),
    _benchmark("batching", 45, 90),
    _benchmark("serving", 215, 330),
    _benchmark("small", 100, 200),
)
