"""`python -m launch.bench.overload`: what a cluster still answers in time when more is asked of it than it can do.

First the rate that it sustains, with so many requests always in flight; then requests that come at multiples of that
rate whether or not others have been answered (Poisson arrivals, as people come). What counts is goodput: the requests
of each second that are answered within their objective.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import httpx
import numpy as np
import typer

if TYPE_CHECKING:
    from launch.bench.workloads import BenchRequest, Workload

TIMEOUT_S = 120.0
WARM_UP = 16


@dataclass(frozen=True)
class Objective:
    """What an answer is worth something for: seconds to its first token, and for each one after that."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True)
class Result:
    """What became of one request: its HTTP status, and when its first and its last token came after it was sent."""

    status: int
    ttft_s: float = float("inf")
    latency_s: float = float("inf")
    num_tokens: int = 0

    def meets(self, objective: Objective) -> bool:
        tpot_s = (self.latency_s - self.ttft_s) / max(1, self.num_tokens - 1)
        return self.status == 200 and self.ttft_s <= objective.ttft_s and tpot_s <= objective.tpot_s


@dataclass
class Level:
    """The requests of one offered rate. `share` is of the sustained rate."""

    share: float
    rate: float
    duration_s: float
    results: list[Result] = field(default_factory=list)

    def goodput(self, objective: Objective) -> float:
        return sum(result.meets(objective) for result in self.results) / self.duration_s


def overload(
    model: Annotated[str, typer.Argument(help="Folder, hub id or bundled name.")] = "signpost",
    topology: Annotated[str | None, typer.Option(help="Of the cluster; 1e1pd, or 1pd for text.")] = None,
    shares: Annotated[str, typer.Option(help="Offered rates as multiples of the sustained one.")] = "0.5,1,1.5,2,3",
    seconds: Annotated[float, typer.Option(min=1, help="Of arrivals at each rate.")] = 20.0,
    in_flight: Annotated[int, typer.Option(min=1, help="Requests at once when the sustained rate is measured.")] = 16,
    ttft_s: Annotated[float, typer.Option(min=0.01, help="Objective: to the first token, in seconds.")] = 2.0,
    tpot_s: Annotated[float, typer.Option(min=0.001, help="Objective: for each token after that.")] = 0.1,
    max_queue_s: Annotated[float | None, typer.Option(help="The server's; half of --ttft-s if not given.")] = None,
) -> None:
    """Measure goodput under overload on a local cluster, and print a table."""
    from common.config import Settings
    from launch.bench.workloads import make_workload
    from launch.cluster import LocalCluster

    workload, objective = make_workload(model), Objective(ttft_s, tpot_s)
    limit_s = max_queue_s or ttft_s / 2
    settings = Settings(model=model, port=0, log_level="error", max_queue_s=limit_s)
    with LocalCluster(settings, topology) as cluster:
        levels = asyncio.run(
            _measure(cluster.base_url, workload, [float(share) for share in shares.split(",")], seconds, in_flight)
        )
    print(
        f"{workload.name} ({workload.unit}), max_queue_s {limit_s:g}, objective TTFT {ttft_s:g} s, TPOT {tpot_s:g} s\n"
    )
    print(table(levels, objective))


def table(levels: Sequence[Level], objective: Objective) -> str:
    """A Markdown table, one row per offered rate."""
    peak = max(level.goodput(objective) for level in levels) or float("nan")
    lines = [
        "| offered, req/s | × sustained | requests | refused | failed | goodput, req/s | of its peak "
        "| TTFT p50 / p99, ms |",
        "|" + "---|" * 8,
    ]
    for level in levels:
        refused = sum(result.status in (429, 503) for result in level.results)
        answered = [result.ttft_s for result in level.results if result.status == 200]
        goodput = level.goodput(objective)
        cells = [
            f"{level.rate:.1f}",
            f"{level.share:g}",
            str(len(level.results)),
            str(refused),
            str(len(level.results) - refused - len(answered)),
            f"{goodput:.1f}",
            f"{goodput / peak:.0%}",
            "{:.0f} / {:.0f}".format(*1000 * np.percentile(answered, (50, 99))) if answered else "–",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


async def _measure(
    base_url: str, workload: Workload, shares: Sequence[float], seconds: float, in_flight: int
) -> list[Level]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=base_url, timeout=TIMEOUT_S, limits=limits, trust_env=False) as client:
        await asyncio.gather(*(_ask(client, request) for request in workload.requests(WARM_UP, seed=-1)))
        sustained = await _sustained_rate(client, workload, seconds, in_flight)
        _tell(f"sustained: {sustained:.1f} requests/s with {in_flight} in flight")
        levels = []
        for share in shares:
            level = await _offer(client, workload, Level(share, share * sustained, seconds))
            _tell(f"{share:g} times that: {len(level.results)} requests")
            levels.append(level)
    return levels


async def _sustained_rate(client: httpx.AsyncClient, workload: Workload, seconds: float, in_flight: int) -> float:
    """Answers per second while so many requests are always in flight."""
    requests = _endless(workload, seed=0)
    end_s = time.perf_counter() + seconds

    async def work() -> int:
        count = 0
        while time.perf_counter() < end_s:
            count += (await _ask(client, next(requests))).status == 200
        return count

    began_s = time.perf_counter()
    counts = await asyncio.gather(*(work() for _ in range(in_flight)))
    return sum(counts) / (time.perf_counter() - began_s)


async def _offer(client: httpx.AsyncClient, workload: Workload, level: Level) -> Level:
    """Send requests at a level's rate for its duration; return once all have been answered or refused."""
    rng = random.Random(f"arrivals {level.share}")
    # Made before the clock runs: drawing pictures would slow the arrivals down.
    requests = workload.requests(max(1, round(level.rate * level.duration_s)), seed=round(1000 * level.share))
    async with asyncio.TaskGroup() as group:
        tasks, next_s = [], time.perf_counter()
        for request in requests:
            next_s += rng.expovariate(level.rate)
            await asyncio.sleep(max(0.0, next_s - time.perf_counter()))
            tasks.append(group.create_task(_ask(client, request)))
    level.results = [task.result() for task in tasks]
    return level


async def _ask(client: httpx.AsyncClient, request: BenchRequest) -> Result:
    from launch.bench.with_cluster import num_tokens_of, payload_of, text_of

    path, payload = payload_of(request)
    began_s, ttft_s, num_tokens = time.perf_counter(), None, 0
    try:
        async with client.stream("POST", path, **payload) as response:
            if response.status_code != 200:
                return Result(response.status_code)
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return Result(500)
                if ttft_s is None and text_of(event):
                    ttft_s = time.perf_counter() - began_s
                num_tokens = num_tokens_of(event) or num_tokens
    except httpx.HTTPError:
        return Result(0)
    latency_s = time.perf_counter() - began_s
    return Result(200, latency_s if ttft_s is None else ttft_s, latency_s, num_tokens)


def _endless(workload: Workload, seed: int) -> Iterator[BenchRequest]:
    while True:
        yield from workload.requests(64, seed)
        seed += 1


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    typer.run(overload)
