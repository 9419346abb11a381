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

    def run(self, batch: Sequence[BenchRequest]) -> list[Outcome]:
        """Answer all at once: `len(batch)` requests in flight from the start."""

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
    """How much is measured. A turn is so many waves of `in_flight` requests at once that they make up its requests."""

    in_flight: Sequence[int]
    repetitions: int
    requests_per_turn: int | None = None
    """What the workload thinks is enough, if not given."""


Progress = Callable[[str], None]
WARM_UP = 4


def measure(workload: Workload, systems: Sequence[System], schedule: Schedule, progress: Progress) -> list[Turn]:
    """All turns. Systems alternate within a repetition and swap places between them, so that neither a slow drift
    of the machine nor the order favours one. Every turn of a repetition gets the same new requests.
    """
    for system in systems:
        progress(f"{workload.name}: warming up {system.name}")
        system.run(workload.requests(WARM_UP, seed=-1))
    turns = []
    for repetition in range(schedule.repetitions):
        for in_flight in schedule.in_flight:
            shift = repetition % len(systems)
            for system in [*systems[shift:], *systems[:shift]]:
                turn = _run_turn(workload, system, in_flight, repetition, schedule)
                progress(f"{workload.name}: {describe(turn)}")
                turns.append(turn)
    return turns


def emit(line: str) -> None:
    """Print a line of progress on standard error."""
    print(line, file=sys.stderr, flush=True)


def describe(turn: Turn) -> str:
    """One line for a person who waits."""
    return (
        f"{turn.system}, {turn.in_flight} in flight, repetition {turn.repetition + 1}: "
        f"{turn.requests_per_s:.2f} requests/s, {turn.tokens_per_s:.1f} tokens/s"
    )


def _run_turn(workload: Workload, system: System, in_flight: int, repetition: int, schedule: Schedule) -> Turn:
    waves = -(-(schedule.requests_per_turn or workload.requests_per_turn) // in_flight)
    requests = workload.requests(waves * in_flight, seed=1000 * repetition + in_flight)
    outcomes: list[Outcome] = []
    start = time.perf_counter()
    for wave in range(waves):
        outcomes += system.run(requests[wave * in_flight : (wave + 1) * in_flight])
    return Turn(system.name, in_flight, repetition, time.perf_counter() - start, outcomes)
