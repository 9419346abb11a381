"""`python -m tools.bench.servers`: the same load on servers that speak OpenAI's API, in turns, in one run.

Whatever answers /v1/completions or /v1/audio/transcriptions can be compared: ours, vLLM's, another one's. They have to
be running; each gets the same new requests, and nobody's turn overlaps another's.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import httpx
import typer

if TYPE_CHECKING:
    from tools.bench.workloads import BenchRequest, Workload

TIMEOUT_S = 600.0
WARM_UP = 8


@dataclass(frozen=True)
class Server:
    """A server under test. `model` is its name for the model."""

    name: str
    base_url: str
    model: str


@dataclass(frozen=True)
class Answer:
    """One request: seconds from sending to the first and to the last token, and how many tokens there were."""

    ttft_s: float
    latency_s: float
    num_tokens: int


@dataclass(frozen=True)
class Turn:
    """One server at one number of requests in flight; a new request starts when one ends."""

    server: str
    in_flight: int
    wall_s: float
    answers: list[Answer]

    @property
    def requests_per_s(self) -> float:
        return len(self.answers) / self.wall_s

    @property
    def tokens_per_s(self) -> float:
        return sum(answer.num_tokens for answer in self.answers) / self.wall_s

    @property
    def ttft_p50_ms(self) -> float:
        return 1e3 * statistics.median(answer.ttft_s for answer in self.answers)

    @property
    def tpot_p50_ms(self) -> float:
        return 1e3 * statistics.median(
            (answer.latency_s - answer.ttft_s) / max(1, answer.num_tokens - 1) for answer in self.answers
        )


def compare(
    model: Annotated[str, typer.Argument(help="Folder of the model: its tokenizer makes the prompts.")],
    server: Annotated[list[str], typer.Option(help="NAME=URL or NAME=URL=MODEL; the last one is the reference.")],
    in_flight: Annotated[str, typer.Option(help="Requests at once, with commas.")] = "1,8,32",
    requests: Annotated[str, typer.Option(help="Requests of a turn, for each number in flight.")] = "8,32,64",
    repetitions: Annotated[int, typer.Option(min=1)] = 3,
    language: Annotated[str | None, typer.Option(help="Of the clips, where the model wants it said.")] = None,
) -> None:
    """Load servers in turns and print ratios to the last of them, with their spread."""
    from tools.bench.workloads import make_workload

    workload = make_workload(model)
    servers = [_parse(text, workload.name) for text in server]
    levels = list(zip(_numbers(in_flight), _numbers(requests), strict=True))
    turns = asyncio.run(_measure(workload, servers, levels, repetitions, language))
    print(table(turns, [one.name for one in servers]))


def table(turns: Sequence[list[Turn]], names: Sequence[str]) -> str:
    """A Markdown table; `turns` has one list per repetition and level, a turn per server in it."""
    lines = [
        "| in flight | server | requests/s | tokens/s out | ratio to the last (spread) | TTFT p50, ms | TPOT p50, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for level in sorted({group[0].in_flight for group in turns}):
        groups = [{turn.server: turn for turn in group} for group in turns if group[0].in_flight == level]
        for name in names:
            own = [group[name] for group in groups]
            ratios = [group[name].tokens_per_s / group[names[-1]].tokens_per_s for group in groups]
            cells = [
                str(level),
                name,
                f"{statistics.median(turn.requests_per_s for turn in own):.2f}",
                f"{statistics.median(turn.tokens_per_s for turn in own):.1f}",
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})",
                f"{statistics.median(turn.ttft_p50_ms for turn in own):.0f}",
                f"{statistics.median(turn.tpot_p50_ms for turn in own):.1f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


async def _measure(
    workload: Workload,
    servers: Sequence[Server],
    levels: Sequence[tuple[int, int]],
    repetitions: int,
    language: str | None,
) -> list[list[Turn]]:
    groups = []
    async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=None)) as client:
        for one in servers:
            await _turn(client, one, workload.requests(WARM_UP, seed=-1), 4, language)
        for repetition in range(repetitions):
            for level, (in_flight, count) in enumerate(levels):
                batch = workload.requests(count, seed=1000 * repetition + level)
                shift = repetition % len(servers)
                group = []
                for one in [*servers[shift:], *servers[:shift]]:
                    turn = await _turn(client, one, batch, in_flight, language)
                    rates = f"{turn.requests_per_s:.2f} requests/s, {turn.tokens_per_s:.1f} tokens/s"
                    print(f"{one.name}, {in_flight} in flight: {rates}", file=sys.stderr, flush=True)
                    group.append(turn)
                groups.append(group)
    return groups


async def _turn(
    client: httpx.AsyncClient, server: Server, requests: Sequence[BenchRequest], in_flight: int, language: str | None
) -> Turn:
    waiting = list(requests)
    answers: list[Answer] = []

    async def work() -> None:
        while waiting:
            request = waiting.pop()
            ask = _transcribe(client, server, request, language) if request.clip else _complete(client, server, request)
            answers.append(await ask)

    start = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(in_flight)))
    return Turn(server.name, in_flight, time.perf_counter() - start, answers)


async def _complete(client: httpx.AsyncClient, server: Server, request: BenchRequest) -> Answer:
    body = {
        "model": server.model,
        "prompt": request.prompt_token_ids,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "ignore_eos": request.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start, times, num_tokens = time.perf_counter(), list[float](), 0
    async with client.stream("POST", f"{server.base_url}/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{server.name} answered {response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[len("data: ") :])
            if event.get("choices"):
                times.append(time.perf_counter() - start)
            if event.get("usage"):
                num_tokens = int(event["usage"]["completion_tokens"])
    return Answer(times[0], times[-1], num_tokens)


async def _transcribe(client: httpx.AsyncClient, server: Server, request: BenchRequest, language: str | None) -> Answer:
    fields = {"model": server.model, "temperature": "0", **({"language": language} if language else {})}
    files = {"file": ("clip.flac", request.clip, "audio/flac")}
    start = time.perf_counter()
    response = await client.post(f"{server.base_url}/v1/audio/transcriptions", data=fields, files=files)
    if response.status_code != 200:
        raise RuntimeError(f"{server.name} answered {response.status_code}: {response.text}")
    took_s = time.perf_counter() - start
    return Answer(took_s, took_s, len(response.json()["text"].split()))


def _parse(text: str, model: str) -> Server:
    name, url, *rest = text.split("=")
    return Server(name, url.rstrip("/"), rest[0] if rest else model)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    typer.run(compare)
