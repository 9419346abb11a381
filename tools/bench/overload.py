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
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Final

import typer
from httpcore import Request

from tools.bench.client import LoadClient, Outcome, payload_of
from tools.bench.measure import emit
from tools.bench.report import markdown, milliseconds

if TYPE_CHECKING:
    from tools.bench.workloads import Workload

WARM_UP: Final = 64


@dataclass(frozen=True)
class Objective:
    """The times within which an answer counts: seconds to the first token, and for each token after that."""

    ttft_s: float
    tpot_s: float

    def met_by(self, outcome: Outcome) -> bool:
        in_time = outcome.ttft_s is not None and outcome.ttft_s <= self.ttft_s
        return outcome.status == 200 and in_time and outcome.tpot_s <= self.tpot_s


@dataclass
class Level:
    """The requests of one offered rate. `share` is of the sustained rate; None: a new one as soon as one has ended.

    Both other fields grow with each turn.
    """

    share: float | None
    duration_s: float = 0.0
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return len(self.outcomes) / self.duration_s

    def goodput(self, objective: Objective) -> float:
        return sum(map(objective.met_by, self.outcomes)) / self.duration_s


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
        asyncio.run(_measure(LoadClient(cluster.base_url), workload, levels, seconds, turns, in_flight))
    print(
        f"{workload.name} ({workload.unit}) as {used}, max_queue_s {limit_s:g}, objective TTFT {ttft_s:g} s, "
        f"TPOT {tpot_s:g} s; {turns} turns of {seconds:g} s\n"
    )
    print(table(levels, objective))


def table(levels: Sequence[Level], objective: Objective) -> str:
    """A Markdown table, one row per offered rate."""
    peak = max(level.goodput(objective) for level in levels) or float("nan")
    header = "× sustained|offered, req/s|requests|refused|failed|late|goodput, req/s|of its peak|TTFT p50 / p99, ms"
    rows = []
    for level in levels:
        refused = sum(outcome.status in (429, 503) for outcome in level.outcomes)
        answered = [outcome for outcome in level.outcomes if outcome.status == 200]
        goodput = level.goodput(objective)
        cells = (
            "as many as fit" if level.share is None else f"{level.share:g}",
            f"{level.rate:.1f}",
            len(level.outcomes),
            refused,
            str(len(level.outcomes) - refused - len(answered)),
            str(sum(not objective.met_by(outcome) for outcome in answered)),
            f"{goodput:.1f}",
            f"{goodput / peak:.0%}",
            milliseconds([outcome.ttft_s for outcome in answered]),
        )
        rows.append(cells)
    return markdown(header.split("|"), rows)


async def _measure(
    client: LoadClient, workload: Workload, levels: Sequence[Level], seconds: float, turns: int, in_flight: int
) -> None:
    """Run every level in turns. Requests are new and made before a clock runs: drawing images takes time, and the load
    shares its cores with the cluster."""
    seeds = itertools.count()

    def make(count: int) -> list[Request]:
        requests = workload.requests(max(1, count), next(seeds))
        return [client.build(*payload_of(request)) for request in requests]

    await client.keep_in_flight(make(WARM_UP), in_flight)
    sustained = await _sustained_rate(client, make(2 * WARM_UP), in_flight)
    sustained = await _sustained_rate(client, make(round(sustained * seconds)), in_flight)
    emit(f"sustained: {sustained:.1f} requests/s with {in_flight} in flight")
    for turn, level in itertools.product(range(turns), levels):
        rate = sustained * (level.share or 1.0)
        requests = make(round(rate * seconds))
        began_s = time.perf_counter()
        if level.share is None:
            level.outcomes += await client.keep_in_flight(requests, in_flight)
        else:
            level.outcomes += await _arrive(client, requests, rate, random.Random(f"arrivals {turn} {level.share}"))
        level.duration_s += time.perf_counter() - began_s
        load = "as many as fit" if level.share is None else f"{level.share:g} times that"
        emit(f"turn {turn + 1}, {load}: {len(requests)} requests")
    await client.close()


async def _sustained_rate(client: LoadClient, requests: Sequence[Request], in_flight: int) -> float:
    """Answers per second while so many requests are always in flight."""
    began_s = time.perf_counter()
    outcomes = await client.keep_in_flight(requests, in_flight)
    return sum(outcome.status == 200 for outcome in outcomes) / (time.perf_counter() - began_s)


async def _arrive(client: LoadClient, requests: Sequence[Request], rate: float, rng: random.Random) -> list[Outcome]:
    """Send requests as people come, `rate` a second (Poisson), whether or not others have been answered."""
    async with asyncio.TaskGroup() as group:
        tasks, next_s = [], time.perf_counter()
        for request in requests:
            next_s += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, next_s - time.perf_counter()))
            tasks.append(group.create_task(client.ask(request)))
    return [task.result() for task in tasks]


if __name__ == "__main__":
    typer.run(overload)
