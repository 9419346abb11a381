"""`python -m tools.bench.overload`: what a cluster still answers in time when more is asked of it than it can do.

First the rate that it sustains, with so many requests always in flight; then requests that come at multiples of that
rate whether or not others have been answered. What counts is goodput: the requests of each second that are answered
within their objective. Its peak is the best of all levels, the one with so many in flight included.

All levels take turns, several times over: what else a machine does falls on all of them alike.

A server refuses whoever would wait longer than its max_queue_s, so it can keep objectives of that and a little more:
the queue is measured with one that is half of the objective. Where the queue may be long, a turn has to be longer still
(`--defaults --seconds 40`).
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final

import numpy as np
import typer

from tools.bench.offered import Level, Objective, arrive, keep_in_flight
from tools.bench.wire import Wire
from tools.bench.with_cluster import payload_of

if TYPE_CHECKING:
    from tools.bench.workloads import Workload

WARM_UP: Final = 64


def overload(
    model: Annotated[str, typer.Argument(help="Folder, hub id or bundled name.")] = "signpost",
    topology: Annotated[str | None, typer.Option(help="Of the cluster; 1e1pd, or 1pd for text.")] = None,
    shares: Annotated[str, typer.Option(help="Offered rates as multiples of the sustained one.")] = "0.5,1,1.5,2,3",
    seconds: Annotated[float, typer.Option(min=1, help="Of arrivals at each rate, in each turn.")] = 10.0,
    turns: Annotated[int, typer.Option(min=1, help="How often each rate has its turn.")] = 3,
    in_flight: Annotated[int, typer.Option(min=1, help="Requests at once when the sustained rate is measured.")] = 16,
    ttft_s: Annotated[float, typer.Option(min=0.01, help="Objective: to the first token, in seconds.")] = 2.0,
    tpot_s: Annotated[float, typer.Option(min=0.001, help="Objective: for each token after that.")] = 0.1,
    max_queue_s: Annotated[float | None, typer.Option(help="The server's; half of --ttft-s if not given.")] = None,
    defaults: Annotated[
        bool, typer.Option("--defaults", help="The server's own max_queue_s, and twice as much for --ttft-s.")
    ] = False,
) -> None:
    """Measure goodput under overload on a local cluster, and print a table."""
    from common.config import Settings
    from launch.cluster.local_cluster import LocalCluster
    from tools.bench.workloads import make_workload

    if defaults:
        max_queue_s = Settings().max_queue_s
        ttft_s = 2 * max_queue_s
    workload, objective = make_workload(model), Objective(ttft_s, tpot_s)
    limit_s = max_queue_s or ttft_s / 2
    settings = Settings(model=model, port=0, log_level="error", max_queue_s=limit_s)
    levels = [Level(None), *(Level(float(share)) for share in shares.split(","))]
    with LocalCluster(settings, topology) as cluster:
        used = cluster.supervisor.plan.topology
        asyncio.run(_measure(Wire(cluster.base_url), workload, levels, seconds, turns, in_flight))
    print(
        f"{workload.name} ({workload.unit}) as {used}, max_queue_s {limit_s:g}, objective TTFT {ttft_s:g} s, "
        f"TPOT {tpot_s:g} s; {turns} turns of {seconds:g} s\n"
    )
    print(table(levels, objective))


def table(levels: Sequence[Level], objective: Objective) -> str:
    """A Markdown table, one row per offered rate."""
    peak = max(level.goodput(objective) for level in levels) or float("nan")
    lines = [
        "| × sustained | offered, req/s | requests | refused | failed | late | goodput, req/s | of its peak "
        "| TTFT p50 / p99, ms |",
        "|" + "---|" * 9,
    ]
    for level in levels:
        refused = sum(result.status in (429, 503) for result in level.results)
        answered = [result for result in level.results if result.status == 200]
        goodput = level.goodput(objective)
        times_ms = [1000 * result.ttft_s for result in answered]
        cells = [
            "as many as fit" if level.share is None else f"{level.share:g}",
            f"{level.rate:.1f}",
            str(len(level.results)),
            str(refused),
            str(len(level.results) - refused - len(answered)),
            str(sum(not objective.met_by(result) for result in answered)),
            f"{goodput:.1f}",
            f"{goodput / peak:.0%}",
            "{:.0f} / {:.0f}".format(*np.percentile(times_ms, (50, 99))) if answered else "–",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


class Supply:
    """Requests that nobody has sent before. They are made before a clock runs: drawing pictures takes time, and the
    load shares its cores with what it loads."""

    def __init__(self, workload: Workload, wire: Wire) -> None:
        self._workload = workload
        self._wire = wire
        self._seeds = itertools.count()

    def take(self, count: int) -> list[bytes]:
        requests = self._workload.requests(max(1, count), next(self._seeds))
        return [self._wire.build(*payload_of(request)) for request in requests]


async def _measure(
    wire: Wire, workload: Workload, levels: Sequence[Level], seconds: float, turns: int, in_flight: int
) -> None:
    supply = Supply(workload, wire)
    await keep_in_flight(wire, supply.take(WARM_UP), in_flight)
    sustained = await _sustained_rate(wire, supply.take(2 * WARM_UP), in_flight)
    sustained = await _sustained_rate(wire, supply.take(round(sustained * seconds)), in_flight)
    _tell(f"sustained: {sustained:.1f} requests/s with {in_flight} in flight")
    for turn, level in itertools.product(range(turns), levels):
        rate = sustained * (level.share or 1.0)
        requests = supply.take(round(rate * seconds))
        began_s = time.perf_counter()
        if level.share is None:
            results = await keep_in_flight(wire, requests, in_flight)
        else:
            results = await arrive(wire, requests, rate, random.Random(f"arrivals {turn} {level.share}"))
        level.add(results, time.perf_counter() - began_s)
        what = "as many as fit" if level.share is None else f"{level.share:g} times that"
        _tell(f"turn {turn + 1}, {what}: {len(results)} requests")
    wire.close()


async def _sustained_rate(wire: Wire, requests: Sequence[bytes], in_flight: int) -> float:
    """Answers per second while so many requests are always in flight."""
    began_s = time.perf_counter()
    results = await keep_in_flight(wire, requests, in_flight)
    return sum(result.status == 200 for result in results) / (time.perf_counter() - began_s)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    typer.run(overload)
