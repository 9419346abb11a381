"""`python -m tools.bench`: the command that makes docs/lab/benchmarks.md."""

from __future__ import annotations

import os
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from common.errors import TriptychError
from common.process import openmp

if TYPE_CHECKING:
    from common.config import Device
    from tools.bench.measure import Schedule
    from tools.bench.with_cluster import ClusterSystem
    from tools.bench.workloads import Workload

WEIGHTS = Path(__file__).resolve().parents[2] / ".cache" / "weights"
DEFAULT_MODELS = (str(WEIGHTS / "smollm2-135m"), str(WEIGHTS / "whisper-tiny.en"), "signpost")
HANDOFFS = 30


def bench(
    models: Annotated[list[str] | None, typer.Argument(help="Folders, hub ids or bundled names.")] = None,
    in_flight: Annotated[str, typer.Option(help="Requests at once, with commas.")] = "1,8,32",
    repetitions: Annotated[int, typer.Option(min=1, help="Turns of every system at every number in flight.")] = 3,
    requests: Annotated[int | None, typer.Option(min=1, help="In one turn, at least one per place in flight.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or auto, for every system.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda or auto, for every system.")] = "auto",
    topology: Annotated[str | None, typer.Option(help="Of the cluster; 1e1pd, or 1pd for text.")] = None,
    note: Annotated[list[str] | None, typer.Option(help="A sentence about this run, for the page.")] = None,
    write: Annotated[Path | None, typer.Option(help="A page to write into, between its marks.")] = None,
) -> None:
    """Measure a cluster against LLM and against transformers' generate.

    The default models are what the tests run on: `python -m tests.weights` makes the folders of SmolLM2-135M and
    Whisper tiny.en, `signpost` is bundled. A quick look at one of them:

        python -m tools.bench signpost --in-flight 1,8 --repetitions 1

    The whole page, half an hour on two cores:

        python -m tools.bench --write docs/lab/benchmarks.md
    """
    openmp.set_defaults(os.environ)
    from tools.bench import report
    from tools.bench.measure import Schedule

    schedule = Schedule([int(part) for part in in_flight.split(",")], repetitions, requests)
    sections = [
        section
        for model in models or DEFAULT_MODELS
        for section in _sections(model, dtype, cast("Device", device), topology, schedule)
    ]
    command = shlex.join(["python", "-m", "tools.bench", *(_relative(argument) for argument in sys.argv[1:])])
    measured = report.page(sections, command, note or [], datetime.now(tz=UTC).date())
    if write is None:
        print(measured)
    else:
        report.write_into(write, measured)


def _sections(model: str, dtype: str, device: Device, topology: str | None, schedule: Schedule) -> list[str]:
    """The table of one model, and the way of a picture through the cluster if it takes pictures."""
    from tools.bench import report
    from tools.bench.lineup import lineup
    from tools.bench.measure import emit, measure
    from tools.bench.workloads import make_workload

    workload = make_workload(model)
    with lineup(workload, dtype, device, topology) as systems:
        sections = [report.table(workload, measure(workload, systems, schedule, emit))]
        if workload.kind != "text":
            title = f"### {workload.name}: one handoff, hop by hop; {HANDOFFS} requests one after the other"
            sections.append(f"{title}\n\n{report.hop_table(_hops(workload, systems[-1]))}")
    return sections


def _hops(workload: Workload, cluster: ClusterSystem) -> dict[str, list[float]]:
    from tools.bench.measure import emit

    emit(f"{workload.name}: {HANDOFFS} requests one after the other, for the hops")
    return cluster.hops([cluster.run([request])[0] for request in workload.requests(HANDOFFS, seed=7)])


def _relative(argument: str) -> str:
    """Paths as a reader has them: from the top of the checkout."""
    path = Path(argument)
    root = Path(__file__).resolve().parents[2]
    return str(path.relative_to(root)) if path.is_absolute() and path.is_relative_to(root) else argument


def main() -> None:
    try:
        typer.run(bench)
    except TriptychError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
