"""Runs every system on the same requests, in turns, and keeps what came out of each turn."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tools.bench.client import Outcome
from tools.bench.workloads import BenchRequest, Workload


class System(Protocol):
    """A system under test."""

    name: str

    def run(self, requests: Sequence[BenchRequest], in_flight: int) -> list[Outcome]:
        """Answer all requests, so many at once."""

    def close(self) -> None:
        """Release processes and memory."""


@dataclass(frozen=True)
class Turn:
    """One system, one number of requests in flight, one repetition."""

    system: str
    in_flight: int
    repetition: int
    wall_s: float
    outcomes: list[Outcome]

    @property
    def requests_per_s(self) -> float:
        return len(self.outcomes) / self.wall_s

    @property
    def tokens_per_s(self) -> float:
        return sum(outcome.num_tokens for outcome in self.outcomes) / self.wall_s


@dataclass(frozen=True)
class Schedule:
    """How much is measured. The requests of a turn are a multiple of those in flight; by default the workload's."""

    in_flight: Sequence[int]
    repetitions: int
    requests_per_turn: int | None = None


Progress = Callable[[str], None]
WARM_UP = 4


def in_waves(
    answer: Callable[[Sequence[BenchRequest]], list[Outcome]], requests: Sequence[BenchRequest], in_flight: int
) -> list[Outcome]:
    """Answer `in_flight` requests at once, and the next ones when all of them have ended."""
    starts = range(0, len(requests), in_flight)
    return [outcome for start in starts for outcome in answer(requests[start : start + in_flight])]


def measure(workload: Workload, systems: Sequence[System], schedule: Schedule, progress: Progress) -> list[Turn]:
    """All turns. Systems alternate within a repetition and swap places between them, so that neither a slow drift
    of the machine nor the order favours one. Every turn of a repetition gets the same new requests.
    """
    for system in systems:
        progress(f"{workload.name}: warming up {system.name}")
        system.run(workload.requests(WARM_UP, seed=-1), WARM_UP)
    turns = []
    for repetition in range(schedule.repetitions):
        for in_flight in schedule.in_flight:
            shift = repetition % len(systems)
            for system in [*systems[shift:], *systems[:shift]]:
                turn = _run_turn(workload, system, in_flight, repetition, schedule)
                progress(f"{workload.name}: {_describe(turn)}")
                turns.append(turn)
    return turns


def emit(line: str) -> None:
    """Print a line of progress on standard error."""
    print(line, file=sys.stderr, flush=True)


def _describe(turn: Turn) -> str:
    return (
        f"{turn.system}, {turn.in_flight} in flight, repetition {turn.repetition + 1}: "
        f"{turn.requests_per_s:.2f} requests/s, {turn.tokens_per_s:.1f} tokens/s"
    )


def _run_turn(workload: Workload, system: System, in_flight: int, repetition: int, schedule: Schedule) -> Turn:
    waves = -(-(schedule.requests_per_turn or workload.requests_per_turn) // in_flight)
    requests = workload.requests(waves * in_flight, seed=1000 * repetition + in_flight)
    start = time.perf_counter()
    outcomes = system.run(requests, in_flight)
    return Turn(system.name, in_flight, repetition, time.perf_counter() - start, outcomes)
