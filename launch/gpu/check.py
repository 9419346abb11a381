"""`make gpu-check`: is everything right on this GPU, and how fast is it? One command for a bare machine.

It installs the carried wheels into a folder of their own, runs every stage in a process of its own with a deadline,
goes on after one that fails, and ends with a table and a JSON file. Standard library alone: nothing else is installed
when it begins.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from launch.gpu.figures import HEADER, Figure
from launch.gpu.layout import ROOT, Carried
from launch.gpu.plan import STAGES
from launch.gpu.stages import Outcome, Stage, run_stage

BUDGET_S: Final = 540.0
INSTALL_LIMIT_S: Final = 120.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; returns the exit status: 0 only if every stage that decides is well."""
    options = _parser().parse_args(arguments)
    began_s = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    carried = Carried(options.carried.resolve())
    install(carried)
    outcomes = run_all(
        _chosen(options.only), environment(carried, options.models), options.out, began_s + options.budget_s
    )
    print("\n" + table(outcomes))
    path = options.out / "gpu-check.json"
    path.write_text(json.dumps({"when": datetime.now(UTC).isoformat(), "stages": [asdict(one) for one in outcomes]}))
    print(f"\nall figures: {path}")
    return int(any(outcome.fails_the_check for outcome in outcomes))


def run_all(stages: Sequence[Stage], environment: Mapping[str, str], folder: Path, deadline_s: float) -> list[Outcome]:
    """Every stage in its turn, told as it ends; `deadline_s` is a time of the monotonic clock."""
    outcomes = []
    for stage in stages:
        print(f"{stage.name} …", flush=True)
        outcomes.append(run_stage(stage, environment, folder, deadline_s - time.monotonic()))
        print(f"  {outcomes[-1].verdict}, {outcomes[-1].seconds:.0f} s: {outcomes[-1].found}", flush=True)
    return outcomes


def install(carried: Carried) -> None:
    """Put the carried wheels and kernels into `site`, from nowhere else; nothing to do where there are no wheels.

    Raises CalledProcessError where pip refuses one of them.
    """
    wheels = sorted(map(str, carried.wheels.glob("*.whl")))
    if not wheels:
        print(f"no wheels in {carried.wheels}: going on with what is installed")
        return
    shutil.rmtree(carried.site, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    command += ["--no-cache-dir", "--target", str(carried.site), *wheels]
    subprocess.run(command, check=True, timeout=INSTALL_LIMIT_S)
    if carried.kernels.is_dir():
        shutil.copytree(carried.kernels, carried.site / "flashinfer" / "data" / "aot", dirs_exist_ok=True)


def environment(carried: Carried, models: Path | None) -> dict[str, str]:
    """What the stages run with: the carried packages first, kernels that survive the run, sleeping OpenMP threads."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    if carried.site.is_dir():
        paths.insert(0, str(carried.site))
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "FLASHINFER_WORKSPACE_BASE": str(carried.workspace),
    }
    return variables if models is None else variables | {"TRIPTYCH_GPU_MODELS": str(models.resolve())}


def table(outcomes: Sequence[Outcome]) -> str:
    """A markdown row for each stage, and one for each figure."""
    lines = ["| stage | result | seconds | found |", "|---|---|---|---|"]
    lines += [f"| {one.stage} | {one.verdict} | {one.seconds:.0f} | {one.found} |" for one in outcomes]
    rows = [Figure(**figure).row() for outcome in outcomes for figure in outcome.figures]
    return "\n".join([*lines, "", HEADER, *rows] if rows else lines)


def _chosen(only: str | None) -> list[Stage]:
    if only is None:
        return list(STAGES)
    names = only.split(",")
    unknown = set(names) - {stage.name for stage in STAGES}
    if unknown:
        known = ", ".join(stage.name for stage in STAGES)
        raise SystemExit(f"no stage {', '.join(sorted(unknown))}; there are: {known}")
    return [stage for stage in STAGES if stage.name in names]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m launch.gpu.check", description=__doc__.split("\n")[0])
    parser.add_argument("--carried", type=Path, default=ROOT / "build" / "gpu", help="folder made by `make gpu-carry`")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-check", help="folder for logs and figures")
    parser.add_argument("--models", type=Path, help="folder of real checkpoints to compare with transformers")
    parser.add_argument("--only", help="stages to run, with commas")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds for all of it")
    return parser


if __name__ == "__main__":
    sys.exit(main())
