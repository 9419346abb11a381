"""`make gpu-check`: is everything right on this GPU, and how fast is it? One command for a bare machine.

It installs the carried wheels into a folder of their own, joins carried checkpoints, and runs every stage with a
deadline: those that decide side by side, each in a process of its own, then the benchmarks one after the other, in one
process as long as that is well. It goes on after one that fails. Three
files are what comes of it, and are whole after every stage: gpu-check.json, gpu-check.md and, at the end, logs.tar.gz.
Standard library alone: nothing else is installed when it begins.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from tools.gpu_check import parts
from tools.gpu_check.figures import HEADER, Figure
from tools.gpu_check.hosted import Host
from tools.gpu_check.layout import ROOT, Carried
from tools.gpu_check.plan import BUDGET_S, CORES_OF_A_LANE, INSTALL_S, LANES, OF_MODELS, STAGES, expected_s
from tools.gpu_check.stages import MODELS, Outcome, Stage, run_stage

INSTALL_LIMIT_S: Final = 120.0
MODELS_FOLDER: Final = ROOT / "build" / "gpu-models"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; returns the exit status: 0 only if every stage that decides is well."""
    options = _parser().parse_args(arguments)
    began_s = time.monotonic()
    stages, results = _chosen(options.only), Results(options.out, options.carried / "logs")
    folder = options.models or (MODELS_FOLDER if MODELS_FOLDER.is_dir() else None)
    here = [stage for stage in stages if folder is not None or stage.name not in OF_MODELS]
    expected = f"{INSTALL_S + expected_s(here, lanes()):.0f} s are expected, by guesses"
    print(f"{expected}; {options.budget_s:.0f} s there are", flush=True)
    carried = Carried(options.carried.resolve())
    install(carried)
    stages, models = join_models(stages, folder)
    outcomes = run_all(stages, environment(carried, models), results, began_s + options.budget_s)
    results.bundle()
    print("\n" + table(outcomes))
    print(f"\nall figures: {results.json}")
    if absent := [outcome.stage for outcome in outcomes if outcome.verdict == "not here"]:
        print(f"not checked, for what they want is not here: {', '.join(absent)}")
    if short := [outcome.stage for outcome in outcomes if outcome.was_cut_short]:
        print(f"what was short of time, in a call of its own: --only {','.join(short)} --out {options.out / 'rest'}")
    return int(any(outcome.fails_the_check for outcome in outcomes))


class Results:
    """The files that come of a check, in `folder`; its logs are elsewhere until they are one file."""

    def __init__(self, folder: Path, logs: Path) -> None:
        self.logs = logs
        folder.mkdir(parents=True, exist_ok=True)
        self.json = folder / "gpu-check.json"
        self._table = folder / "gpu-check.md"
        self._bundle = folder / "logs.tar.gz"
        shutil.rmtree(self.logs, ignore_errors=True)
        self.logs.mkdir(parents=True)

    def write(self, outcomes: Sequence[Outcome]) -> None:
        """What there is so far: who ends the check early keeps it."""
        content = {"when": datetime.now(UTC).isoformat(), "stages": [asdict(one) for one in outcomes]}
        for path, text in ((self.json, json.dumps(content)), (self._table, table(outcomes) + "\n")):
            whole = path.with_name(f"{path.name}.part")
            whole.write_text(text)
            whole.replace(path)

    def bundle(self) -> None:
        """All logs in one file; a machine may give back only a few."""
        with tarfile.open(self._bundle, "w:gz") as archive:
            archive.add(self.logs, "logs")
        shutil.rmtree(self.logs)


def run_all(
    stages: Sequence[Stage], environment: Mapping[str, str], results: Results, deadline_s: float
) -> list[Outcome]:
    """Every stage, told as it ends; `deadline_s` is a time of the monotonic clock. Those that decide run in LANES,
    fewer on few cores; outcomes are in the order of the stages."""
    done: dict[str, Outcome] = {}
    hosts: dict[tuple[str, ...], Host] = {}

    def run(stage: Stage, host: Host | None = None) -> Outcome:
        print(f"{stage.name} … {stage.expected_s:.0f} s expected, at most {stage.limit_s:.0f} s", flush=True)
        left_s = deadline_s - time.monotonic()
        if not stage.decides and left_s < stage.expected_s / 2:
            left_s = 0.0  # a later one may make more of it
        return run_stage(stage, environment, results.logs, left_s, host)

    def note(outcome: Outcome) -> None:
        done[outcome.stage] = outcome
        print(f"  {outcome.stage}: {outcome.verdict}, {outcome.seconds:.0f} s: {outcome.found}", flush=True)
        results.write([done[stage.name] for stage in stages if stage.name in done])

    _side_by_side([stage for stage in stages if stage.decides], run, note)
    with ExitStack() as stack:
        for stage in stages:
            if stage.host and stage.host not in hosts:
                hosts[stage.host] = stack.enter_context(Host(stage.host, environment))
            if not stage.decides:
                note(run(stage, hosts.get(stage.host)))
    return [done[stage.name] for stage in stages]


def _side_by_side(stages: Sequence[Stage], run: Callable[[Stage], Outcome], note: Callable[[Outcome], None]) -> None:
    with ThreadPoolExecutor(lanes()) as pool:
        for ended in as_completed([pool.submit(run, stage) for stage in stages]):
            note(ended.result())


def lanes() -> int:
    """How many stages that decide run at once here."""
    return max(1, min(LANES, len(os.sched_getaffinity(0)) // CORES_OF_A_LANE))


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
    if carried.kernels.exists():
        with tarfile.open(carried.kernels) as archive:
            archive.extractall(carried.site / "flashinfer" / "data" / "aot", filter="data")


def join_models(stages: Sequence[Stage], folder: Path | None) -> tuple[list[Stage], Path | None]:
    """The folder of real checkpoints for the stages that want some. Where it cannot be had whole, these will fail, with
    the reason, and no other."""
    if folder is None or not any(stage.name in OF_MODELS for stage in stages):
        return list(stages), None
    try:
        return list(stages), parts.join(folder.resolve())
    except (OSError, EOFError, ValueError, lzma.LZMAError, tarfile.TarError) as error:
        tell = (sys.executable, "-c", f"raise SystemExit({f'{folder}: {error}'!r})")
        failing = (replace(stage, command=tell, missing=lambda _: None) for stage in stages if stage.name in OF_MODELS)
        instead = {stage.name: stage for stage in failing}
        return [instead.get(stage.name, stage) for stage in stages], None


def environment(carried: Carried, models: Path | None) -> dict[str, str]:
    """What the stages run with: the carried packages first, kernels that survive the run, sleeping OpenMP threads, and
    no look at a hub, which would be waited for."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    if carried.site.is_dir():
        paths.insert(0, str(carried.site))
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "FLASHINFER_WORKSPACE_BASE": str(carried.workspace),
    }
    return variables if models is None else variables | {MODELS: str(models.resolve())}


def table(outcomes: Sequence[Outcome]) -> str:
    """A markdown row for each stage, and one for each figure."""
    lines = ["| stage | result | seconds | expected | limit | found |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {one.stage} | {one.verdict} | {one.seconds:.0f} | {one.expected_s:.0f} | {one.limit_s:.0f} | {one.found} |"
        for one in outcomes
    ]
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
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_check.check", description=__doc__.split("\n")[0])
    parser.add_argument("--carried", type=Path, default=ROOT / "build" / "gpu", help="folder made by `make gpu-carry`")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-check", help="folder for figures and logs")
    parser.add_argument(
        "--models",
        type=Path,
        help="folder of real checkpoints, or of their carried parts; build/gpu-models, if it is there",
    )
    parser.add_argument("--only", help="stages to run, with commas; without it all of them, as far as there is time")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds for all of it")
    return parser


if __name__ == "__main__":
    sys.exit(main())
