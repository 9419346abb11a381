"""`python -m tools.bench`: the command that makes docs/lab/benchmarks.md."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from common.errors import TriptychError
from common.process import openmp

if TYPE_CHECKING:
    from common.config import Device
    from tools.bench.measure import Schedule, System
    from tools.bench.systems import ClusterSystem, ServerSystem
    from tools.bench.workloads import Workload

ROOT = Path(__file__).resolve().parents[2]
WEIGHTS = ROOT / ".cache" / "weights"
DEFAULT_MODELS = (str(WEIGHTS / "smollm2-135m"), str(WEIGHTS / "whisper-tiny.en"), "signpost")
WARM_UP_HANDOFFS = 5
"""Requests that are not counted: connections are made, memory is touched for the first time."""


def bench(
    models: Annotated[list[str] | None, typer.Argument(help="Folders, hub ids or bundled names.")] = None,
    in_flight: Annotated[str, typer.Option(help="Requests at once, with commas.")] = "1,8,32",
    repetitions: Annotated[int, typer.Option(min=1, help="Turns of every system at every number in flight.")] = 3,
    requests: Annotated[int | None, typer.Option(min=1, help="In one turn, at least one per place in flight.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or auto, for every system.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda or auto, for every system.")] = "auto",
    topology: Annotated[str | None, typer.Option(help="Of the cluster; 1e1pd, or 1pd for text.")] = None,
    handoffs: Annotated[int, typer.Option(min=1, help="Requests one after the other, to time each hop.")] = 30,
    server: Annotated[
        list[str] | None,
        typer.Option(help="NAME=URL or NAME=URL=MODEL, in place of the three systems; ratios are to the first."),
    ] = None,
    language: Annotated[str | None, typer.Option(help="Of the audio, where a server wants it said.")] = "en",
    note: Annotated[list[str] | None, typer.Option(help="A sentence about this run, for the page.")] = None,
    write: Annotated[Path | None, typer.Option(help="A page to write into, between its marks.")] = None,
) -> None:
    """Measure a cluster against LLM and against transformers' generate, or servers of OpenAI's API that run already.

    The default models are what the tests run on: `python -m tests.weights` makes the folders of SmolLM2-135M and
    Whisper tiny.en, `signpost` is bundled. A quick look at one of them; ours beside another server; the hops of a
    handoff; the whole page, half an hour on two cores:

        python -m tools.bench signpost --in-flight 1,8 --repetitions 1

        python -m tools.bench FOLDER --server theirs=http://127.0.0.1:9000 --server ours=http://127.0.0.1:8000

        python -m tools.bench MODEL --in-flight 1 --repetitions 1 --requests 1 --handoffs 100

        python -m tools.bench --write docs/lab/benchmarks.md
    """
    openmp.set_defaults(os.environ)
    from tools.bench import report
    from tools.bench.measure import Schedule
    from tools.bench.systems import lineup
    from tools.bench.workloads import make_workload

    schedule = Schedule([int(part) for part in in_flight.split(",")], repetitions, requests)
    sections: list[str] = []
    for model in models or DEFAULT_MODELS:
        workload = make_workload(model)
        if server:
            with ExitStack() as stack:
                servers = [stack.enter_context(closing(_server(text, workload.name, language))) for text in server]
                sections.append(_table(workload, servers, schedule))
            continue
        with lineup(workload, dtype, cast("Device", device), topology) as systems:
            sections += [_table(workload, systems, schedule), *_hops(workload, systems[-1], handoffs)]
    command = shlex.join(["python", "-m", "tools.bench", *(_relative(argument) for argument in sys.argv[1:])])
    measured = report.page(sections, command, note or [], datetime.now(tz=UTC).date())
    if write is None:
        print(measured)
    else:
        report.write_into(write, measured)


def _server(text: str, model: str, language: str | None) -> ServerSystem:
    from tools.bench.systems import ServerSystem

    name, url, *rest = text.split("=")
    return ServerSystem(name, url.rstrip("/"), rest[0] if rest else model, language)


def _table(workload: Workload, systems: Sequence[System], schedule: Schedule) -> str:
    from tools.bench import report
    from tools.bench.measure import emit, measure

    return report.table(workload, measure(workload, systems, schedule, emit))


def _hops(workload: Workload, cluster: ClusterSystem, count: int) -> Iterator[str]:
    """Yield the table of a handoff's hops, if the model takes media.

    One request follows the other, so that the way itself is measured: neither a queue in front of it nor a step of the
    decoder's engine that its commands wait for.
    """
    if workload.kind == "text":
        return
    from tools.bench import report

    outcomes = cluster.run(workload.requests(WARM_UP_HANDOFFS + count, seed=7), 1)[WARM_UP_HANDOFFS:]
    title = f"### {workload.name}: one handoff, hop by hop; {count} requests one after the other"
    yield f"{title}\n\n{report.hop_table(cluster.hops(outcomes))}"


def _relative(argument: str) -> str:
    """Paths as a reader has them: from the top of the checkout."""
    path = Path(argument)
    return str(path.relative_to(ROOT)) if path.is_absolute() and path.is_relative_to(ROOT) else argument


def main() -> None:
    try:
        typer.run(bench)
    except TriptychError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
