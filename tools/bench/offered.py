"""Requests at a given rate, or so many at once, and what becomes of them: the load of the overload benchmark."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tools.bench.wire import Result, Wire


@dataclass(frozen=True)
class Objective:
    """What an answer is worth something for: seconds to its first token, and for each one after that."""

    ttft_s: float
    tpot_s: float

    def met_by(self, result: Result) -> bool:
        tpot_s = (result.latency_s - result.ttft_s) / max(1, result.num_tokens - 1)
        return result.status == 200 and result.ttft_s <= self.ttft_s and tpot_s <= self.tpot_s


@dataclass
class Level:
    """The requests of one offered rate. `share` is of the sustained rate; None: a new one as soon as one has ended.

    Both others grow with each turn.
    """

    share: float | None
    duration_s: float = 0.0
    results: list[Result] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return len(self.results) / self.duration_s

    def goodput(self, objective: Objective) -> float:
        return sum(map(objective.met_by, self.results)) / self.duration_s

    def add(self, results: Sequence[Result], duration_s: float) -> None:
        self.results += results
        self.duration_s += duration_s


async def keep_in_flight(wire: Wire, requests: Sequence[bytes], count: int) -> list[Result]:
    """Send all requests, `count` at once: the next one as soon as one has ended."""
    waiting = iter(requests)

    async def work() -> list[Result]:
        return [await wire.ask(request) for request in waiting]

    return list(itertools.chain.from_iterable(await asyncio.gather(*(work() for _ in range(count)))))


async def arrive(wire: Wire, requests: Sequence[bytes], rate: float, rng: random.Random) -> list[Result]:
    """Send requests as people come, `rate` a second (Poisson), whether or not others have been answered; return once
    all have been answered or refused.
    """
    async with asyncio.TaskGroup() as group:
        tasks, next_s = [], time.perf_counter()
        for request in requests:
            next_s += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, next_s - time.perf_counter()))
            tasks.append(group.create_task(wire.ask(request)))
    return [task.result() for task in tasks]
