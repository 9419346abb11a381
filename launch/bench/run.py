"""`triptych bench`: warm-up, the runs with their progress, the report."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from common.errors import TriptychError, invalid
from launch.bench.figures import METRICS, STATISTICS, Run
from launch.bench.load import Level, apply, repeat_jobs
from launch.bench.plot import check_plot, draw
from launch.cli.client import ApiClient, ClientOptions, ClientRequest, ClientResult
from launch.cli.console import make_console, make_table
from launch.cli.request import EXIT_INTERRUPTED

_LATE_S: Final = 0.1
_SHORT_TOKENS: Final = 16


@dataclass(frozen=True)
class BenchPlan:
    """The loads of a benchmark, and the files that it writes."""

    levels: Sequence[Level]
    num_requests: int
    warm_up: int
    fresh: bool
    seed: int
    objectives: dict[str, float] = field(default_factory=dict)
    export: Path | None = None
    plot: Path | None = None


def parse_levels(concurrency: str, rate: str, *, constant: bool) -> list[Level]:
    """Return the levels of comma-separated numbers, such as `1,8,32` in flight; or of rates.

    Raises TriptychError("invalid_request") for both at once, and for numbers that are none.
    """
    if concurrency and rate:
        raise invalid("--concurrency is a closed loop, --rate an open one: give one of them", "rate")
    try:
        closed = [Level(concurrency=int(one)) for one in (concurrency or "1").split(",") if not rate]
        levels = closed or [Level(rate=float(one), constant=constant) for one in rate.split(",")]
        if all(0 < level.concurrency <= 4096 or 0 < level.rate <= 1e5 for level in levels):
            return levels
    except ValueError:
        pass
    raise invalid(f"{concurrency or rate!r} should be positive numbers, separated by commas, such as 1,8,32")


def parse_extra(text: str) -> dict[str, Any]:
    """Return the fields of a JSON object; none of an empty text. Raises TriptychError("invalid_request")."""
    try:
        fields = json.loads(text or "{}")
    except ValueError as error:
        raise invalid(f"extra is not JSON: {error}", "extra") from error
    if not isinstance(fields, dict):
        raise invalid(f'extra should be a JSON object, such as {{"ignore_eos": true}}, not {text[:80]}', "extra")
    return fields


def run_bench(once: Sequence[ClientRequest], options: ClientOptions, plan: BenchPlan) -> int:
    """Run all levels, print and write the figures; return 1 if a request failed, 130 after Ctrl-C, 0 otherwise.

    Raises TriptychError where nobody answers, the warm-up fails, or a file cannot be written.
    """
    for path in filter(None, (plan.export, plan.plot)):
        if not path.absolute().parent.is_dir():
            raise invalid(f"cannot write {path}: there is no folder {path.absolute().parent}")
    if plan.plot is not None:
        check_plot(plan.plot)
    runs: list[Run] = []
    client, interrupted = ApiClient(options), False
    try:
        asyncio.run(_run_all(once, client, plan, runs))
    except KeyboardInterrupt:
        if not runs:
            raise
        interrupted = True
    console, model = make_console(), client.model
    for run in runs:
        _report(console, run)
    body = {"model": model, "url": options.url, "date": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"}
    try:
        if plan.export is not None:
            plan.export.write_text(json.dumps({**body, "runs": [run.to_json() for run in runs]}, indent=1) + "\n")
        if plan.plot is not None:
            draw(runs, f"{model} at {options.url}", plan.plot)
    except OSError as error:
        raise invalid(f"cannot write {error.filename}: {error.strerror}") from error
    if interrupted:
        return EXIT_INTERRUPTED
    return int(any(len(run.good) < len(run.results) for run in runs))


async def _run_all(once: Sequence[ClientRequest], client: ApiClient, plan: BenchPlan, runs: list[Run]) -> None:
    """Add a run per level, at its begin: after Ctrl-C the last one has what had ended."""
    async with client:
        await client.connect()
        jobs = repeat_jobs(once, plan.warm_up, fresh=plan.fresh, seed=plan.seed - 1)
        failed: list[ClientResult] = []
        await apply(Level(concurrency=min(4, max(1, len(jobs)))), client, jobs, 0, failed.append)
        if error := next((one.error for one in failed if one.error is not None), None):
            raise TriptychError("unavailable", f"the warm-up failed: {error}")
        for seed, level in enumerate(plan.levels, plan.seed):
            jobs = repeat_jobs(once, plan.num_requests, fresh=plan.fresh, seed=seed)
            results: list[ClientResult] = []
            runs.append(Run(str(level), results, plan.objectives))
            lag_s = await _run_level(level, client, jobs, seed, results)
            runs[-1] = replace(runs[-1], lag_s=lag_s)


async def _run_level(
    level: Level, client: ApiClient, jobs: Sequence[ClientRequest], seed: int, results: list[ClientResult]
) -> float:
    """Add the results of one level; return the client's delay in seconds.

    A terminal shows a bar meanwhile, on standard error: figures alone are output.
    """
    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task(str(level), total=len(jobs))

            def on_end(result: ClientResult) -> None:
                results.append(result)
                bar.advance(task)

            return await apply(level, client, jobs, seed, on_end)
    finally:
        console.print(f"{level}: {len(results)} of {len(jobs)} requests ended", highlight=False)


def _report(console: Console, run: Run) -> None:
    figures: dict[str, Any] = run.to_json()
    table = make_table(f"\n{run.level}", ("", *STATISTICS))
    for name, unit in METRICS.items():
        cells = (figures["metrics"][name][one] for one in STATISTICS)
        table.add_row(f"{name.replace('_', ' ')}, {unit}", *("–" if cell is None else f"{cell:.1f}" for cell in cells))
    console.print(table)
    parts = [
        f"{len(run.good)} of {len(run.results)} requests answered in {run.duration_s:.2f} s",
        f"{figures['request_throughput']:.2f} requests/s",
    ]
    if figures["output_token_throughput"]:  # transcriptions count seconds
        parts.append(f"{figures['output_token_throughput']:.1f} output tokens/s")
    if (tokens := figures["metrics"]["output_tokens"]["avg"]) is not None and tokens < _SHORT_TOKENS:
        text = f"answers of {tokens:.0f} tokens are too short for gaps: more --max-tokens, or ignore_eos by --extra"
        console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)
    if figures["goodput"] is not None:
        parts.append(f"goodput {figures['goodput']:.2f} requests/s")
    console.print(" · ".join(parts), highlight=False)
    if run.lag_s > _LATE_S:
        text = f"this client was up to {run.lag_s:.1f} s late: the real rate was lower than asked for"
        console.print(text, style="yellow", highlight=False)
    for error, count in figures["errors"].items():
        console.print(f"{count} failed: {error}", style="red", markup=False, highlight=False)
