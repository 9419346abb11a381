"""`python -m tools.bench.servers`: the same load on servers that speak OpenAI's API, in turns, in one run.

Every server of /v1/completions or /v1/audio/transcriptions can be compared: ours, vLLM's, another. All have to run
already; each gets the same new requests, and no turn overlaps another.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from common.errors import TriptychError
from tools.bench.client import LoadClient, payload_of
from tools.bench.measure import Turn, describe, emit
from tools.bench.report import markdown
from tools.bench.workloads import BenchRequest, Workload, make_workload

WARM_UP = 8


@dataclass(frozen=True)
class Server:
    """A server under test. `model` is its name for the model."""

    name: str
    base_url: str
    model: str


def compare(
    model: Annotated[str, typer.Argument(help="Folder of the model: its tokenizer makes the prompts.")],
    server: Annotated[list[str], typer.Option(help="NAME=URL or NAME=URL=MODEL; the last one is the reference.")],
    in_flight: Annotated[str, typer.Option(help="Requests at once, with commas.")] = "1,8,32",
    requests: Annotated[str, typer.Option(help="Requests of a turn, for each number in flight.")] = "8,32,64",
    repetitions: Annotated[int, typer.Option(min=1)] = 3,
    language: Annotated[str | None, typer.Option(help="Of the audio, where the model wants it said.")] = None,
) -> None:
    """Load servers in turns and print ratios to the last of them, with their spread."""
    workload = make_workload(model)
    servers = [_parse(text, workload.name) for text in server]
    levels = list(zip(_numbers(in_flight), _numbers(requests), strict=True))
    turns = asyncio.run(_measure(workload, servers, levels, repetitions, language))
    print(table(turns, [one.name for one in servers]))


def table(turns: Sequence[Turn], names: Sequence[str]) -> str:
    """Return a Markdown table; ratios compare turns of the same level and repetition."""
    header = "in flight|server|requests/s|tokens/s out|ratio to the last (spread)|TTFT p50, ms|TPOT p50, ms"
    rows = []
    for level in sorted({turn.in_flight for turn in turns}):
        reference = {t.repetition: t for t in turns if (t.in_flight, t.system) == (level, names[-1])}
        for name in names:
            own = [turn for turn in turns if (turn.in_flight, turn.system) == (level, name)]
            ratios = [turn.tokens_per_s / reference[turn.repetition].tokens_per_s for turn in own]
            ttft_s = [statistics.median(one.ttft_s or 0.0 for one in turn.outcomes) for turn in own]
            tpot_s = [statistics.median(one.tpot_s for one in turn.outcomes) for turn in own]
            cells = (
                level,
                name,
                f"{statistics.median(turn.requests_per_s for turn in own):.2f}",
                f"{statistics.median(turn.tokens_per_s for turn in own):.1f}",
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})",
                f"{1e3 * statistics.median(ttft_s):.0f}",
                f"{1e3 * statistics.median(tpot_s):.1f}",
            )
            rows.append(cells)
    return markdown(header.split("|"), rows)


async def _measure(
    workload: Workload,
    servers: Sequence[Server],
    levels: Sequence[tuple[int, int]],
    repetitions: int,
    language: str | None,
) -> list[Turn]:
    turns = []
    for one in servers:
        await _turn(one, workload.requests(WARM_UP, seed=-1), 4, -1, language)
    for repetition in range(repetitions):
        for level, (in_flight, count) in enumerate(levels):
            batch = workload.requests(count, seed=1000 * repetition + level)
            shift = repetition % len(servers)
            for one in [*servers[shift:], *servers[:shift]]:
                turns.append(await _turn(one, batch, in_flight, repetition, language))
                emit(describe(turns[-1]))
    return turns


async def _turn(
    server: Server, batch: Sequence[BenchRequest], in_flight: int, repetition: int, language: str | None
) -> Turn:
    """A new request starts when one ends. Raise TriptychError("unavailable") where one is not answered."""
    client = LoadClient(server.base_url)
    requests = [client.build(*payload_of(request, server.model, language)) for request in batch]
    start = time.perf_counter()
    outcomes = await client.keep_in_flight(requests, in_flight)
    took_s = time.perf_counter() - start
    client.close()
    for outcome in outcomes:
        if outcome.status != 200:
            raise TriptychError("unavailable", f"{server.name} answered {outcome.status}: {outcome.error}")
    return Turn(server.name, in_flight, repetition, took_s, outcomes)


def _parse(text: str, model: str) -> Server:
    name, url, *rest = text.split("=")
    return Server(name, url.rstrip("/"), rest[0] if rest else model)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    typer.run(compare)
