"""The stages of the GPU check: those that decide, which run side by side, then the benchmarks, one after the other.

What matters most comes first: where something takes longer than is thought here, the last benchmarks may find no time
left. Standard library alone.

Estimates are for an H100 with 16 cores and kernels that were built ahead. Nothing of it has run there: they are sums of
guesses and of what was measured without a GPU, and whoever has measured better puts that in their place.

    a process        8 s for Python, torch and a CUDA context, of which imports take 4 s on one core without a GPU; once
                     for all benchmarks
    an engine        2 s for tiny models; for 3B shapes, whose weights are drawn on the device, 4 s, and 0.15 s for
                     each of the 35 batch sizes up to 256 that are recorded, 5 s
    a cluster        10 s more than without a GPU, for its workers start at the same time; 35 s for two with 3B shapes
    tests            without a GPU, on one core, a slow stand-in computing for FlashInfer: 26 s for `engine`, 19 s each
                     for `fast-path` and `no-waits`, 25 s for `cluster`, 19 s for `handover`; more on a GPU: 16, 14 and
                     14 engines, then 3 engines and 3 clusters each. Half as much again, for eight lanes share
                     the machine, and the start of the process
    checkpoints      three small ones: 36 s for references and engines on the CPU, 3 engines; likewise 15 s, 3 engines
                     and 3 clusters of 18 s; half as much again, and the start of the process
    a benchmark      its engines, its prompts (131,000 tokens at batch 256: 2 s at a third of an H100's arithmetic), and
                     its steps: 192 at each batch, of 2 to 10 ms
    clients          in `serving` 100 requests with 8 pictures keep the GPU busy for 10 s, and take 15 s with what the
                     host does for them; with 4 pictures 8 s, with one 5 s, of text alone 3 s
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from tools.gpu_check.stages import MODELS, REPORT, Stage, read_json, read_junit

BUDGET_S: Final = 540.0
"""For all of it: less than ten minutes, with a minute for what comes before and after."""
INSTALL_S: Final = 15.0
"""What carried wheels and the joining of carried checkpoints are expected to take."""
START_S: Final = 12.0
"""What the process of all benchmarks is expected to take until it begins with the first one."""
LANES: Final = 8
"""So many stages that decide run at once: they look at results, not at times."""
CORES_OF_A_LANE: Final = 2
OF_MODELS: Final = ("checkpoints", "checkpoint-clusters", "bench-small")
"""Stages that want real checkpoints."""
_PYTEST: Final = (sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={REPORT}")
_SANITIZER: Final = "compute-sanitizer"
_KERNELS: Final = ("tests/gpu/test_kernels.py",)
_ENGINE, _CLUSTER, _CHECKPOINTS = (f"tests/gpu/test_{name}.py" for name in ("engine", "cluster", "checkpoints"))
_BENCHMARKS: Final = (sys.executable, "-m", "tools.bench_gpu", "--host")
_THREADS: Final = {"OMP_NUM_THREADS": str(CORES_OF_A_LANE)}
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
    missing = _without_models if f"bench-{name}" in OF_MODELS else _nothing
    words = (name, "--out", REPORT)
    return Stage(
        f"bench-{name}", words, expected_s, limit_s, read_json, decides=False, missing=missing, host=_BENCHMARKS
    )


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


def expected_s(stages: Sequence[Stage], lanes: int = LANES) -> float:
    """Of a check of these stages: those that decide in so many lanes, in their order; the installation is left out."""
    ends_s = [0.0] * lanes
    for stage in stages:
        if stage.decides:
            ends_s[ends_s.index(min(ends_s))] += stage.expected_s
    starts_s = START_S * len({stage.host for stage in stages if stage.host})
    return max(ends_s) + starts_s + sum(stage.expected_s for stage in stages if not stage.decides)


STAGES: Final = (
    Stage("environment", (sys.executable, "-m", "tools.gpu_check.environment", "--out", REPORT), 8, 60, read_json),
    _tests("checkpoint-clusters", _CHECKPOINTS, "-k", "cluster", expected_s=115, limit_s=240),
    _tests("engine", _ENGINE, "-k", "not fast_path and not no_step_waits", expected_s=95, limit_s=240),
    _tests("cluster", _CLUSTER, "-k", "bundled", expected_s=100, limit_s=240),
    _tests("handover", _CLUSTER, "-k", "not bundled", expected_s=90, limit_s=240),
    _tests("fast-path", _ENGINE, "-k", "fast_path", expected_s=80, limit_s=240),
    _tests("no-waits", _ENGINE, "-k", "no_step_waits", expected_s=80, limit_s=240),
    _tests("checkpoints", _CHECKPOINTS, "-k", "not cluster", expected_s=75, limit_s=240),
    _sanitized("sanitizer", *_KERNELS, expected_s=60, limit_s=150),
    _tests("attention", "tests/gpu/test_attention.py", *_KERNELS, expected_s=45, limit_s=240),
    _tests("runner", "tests/engine", expected_s=25, limit_s=120),
    _tests("transports", "tests/broker", "tests/services", expected_s=25, limit_s=90),
    _benchmark("decode", 18, 60),
    _benchmark("prefill", 7, 40),
    _benchmark("cross", 20, 60),
    _benchmark("cross_plan", 6, 40),
    _benchmark("encoder", 20, 60),
    _benchmark("handoff", 22, 75),
    _benchmark("batching", 30, 80),
    _benchmark("serving", 115, 200),
    _benchmark("small", 90, 170),
)
