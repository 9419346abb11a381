"""Answers on the terminal: finished answers above, answers in progress and a bar below; times, rates and timelines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from launch.cli.client import ClientRequest, ClientResult

_SHOWN_IN_PROGRESS = 8
PERCENTILES = (50, 90, 99)
_COLOURS = {
    "proxy": "white",
    "preprocess": "cyan",
    "grant": "yellow",
    "encode": "blue",
    "handoff": "magenta",
    "queue": "yellow",
    "inputs": "bright_black",
    "prefill": "green",
    "decode": "bright_green",
}
_EIGHTHS = " ▏▎▍▌▋▊▉█"


class AnswerView:
    """Shows the answers of `total` jobs. Where the output is no terminal, only finished answers are printed.

    `live`: also the answers that are still growing.
    """

    def __init__(self, console: Console, title: str, total: int, *, live: bool) -> None:
        self._console = console
        self._total = total
        self._live_answers = live
        self._growing: dict[int, tuple[ClientRequest, str]] = {}
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console)
        self._task = self._progress.add_task(title, total=total)
        self._done = 0
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(get_renderable=self._render, console=console, transient=True, refresh_per_second=10)

    def __enter__(self) -> AnswerView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def grow(self, key: int, job: ClientRequest, text: str) -> None:
        """Another piece of the answer to job number `key`."""
        if self._live_answers:
            self._growing[key] = (job, self._growing.get(key, (job, ""))[1] + text)

    def finish(self, key: int, outcome: ClientResult) -> None:
        """Show the whole answer, or the error."""
        self._growing.pop(key, None)
        self._done += 1
        self._progress.advance(self._task)
        good = outcome.error is None
        line = Text.assemble(
            (f"[{self._done}/{self._total}] ", "dim"),
            ("✓ " if good else "✗ ", "green" if good else "red"),
            (f"{outcome.job.name}: ", "bold"),
            outcome.text.strip() if good else (outcome.error or "", "red"),
            (f"  {outcome.latency_s:.2f} s", "dim"),
        )
        self._console.print(line, soft_wrap=not self._console.is_terminal)

    def _render(self) -> RenderableType:
        shown = list(self._growing.values())[:_SHOWN_IN_PROGRESS]
        lines = [Text.assemble("… ", (f"{job.name}: ", "bold"), text[-400:]) for job, text in shown]
        return Group(*lines, self._progress)


def latency_table(outcomes: Sequence[ClientResult]) -> Table:
    """Return TTFT, latency and tokens/s of the successful requests, at p50, p90 and p99.

    The p99 of tokens/s is the rate that 99 % of the requests reach or exceed: a slow tail shows in every row.
    """
    good = [outcome for outcome in outcomes if outcome.error is None]
    table = Table()
    table.add_column("")
    for percentile in PERCENTILES:
        table.add_column(f"p{percentile}", justify="right")
    ttfts = [outcome.ttft_s for outcome in good if outcome.ttft_s is not None]
    rates = [outcome.tokens_per_s for outcome in good if outcome.tokens_per_s is not None]
    table.add_row("TTFT", *_cells(ttfts, PERCENTILES, _seconds))
    table.add_row("latency", *_cells([outcome.latency_s for outcome in good], PERCENTILES, _seconds))
    table.add_row("tokens/s per request", *_cells(rates, [100 - p for p in PERCENTILES], lambda rate: f"{rate:.1f}"))
    return table


def summary(outcomes: Sequence[ClientResult], wall_s: float) -> str:
    """Return a line with the number of answers and the total rate."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    tokens = sum(outcome.completion_tokens or 0 for outcome in good)
    rate = f" · {tokens / wall_s:.1f} tokens/s" if tokens else ""  # transcriptions count seconds
    answered = f"{len(good)} of {len(outcomes)} requests answered in {wall_s:.2f} s"
    return f"{answered} · {len(good) / wall_s:.2f} requests/s{rate}"


def timeline_table(spans: Sequence[dict[str, Any]], width: int = 40) -> Table:
    """Return a table with a row per span (`stage`, `instance`, `start_s`, `end_s`), drawn over `width` cells."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 1))
    for justify in ("left", "left", "right", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    if not spans:
        return table
    ordered = sorted(spans, key=lambda span: (span["start_s"], span["end_s"]))
    first_s, last_s = ordered[0]["start_s"], max(span["end_s"] for span in ordered)
    per_cell_s = max(last_s - first_s, 1e-6) / width
    for span in ordered:
        start_s, length_s = span["start_s"] - first_s, span["end_s"] - span["start_s"]
        colour = _COLOURS.get(span["stage"], "white")
        bar = draw_bar(start_s / per_cell_s, length_s / per_cell_s)
        when, length = f"at {1000 * start_s:.1f}", f"{1000 * length_s:.1f} ms"
        table.add_row(Text(span["stage"], colour), Text(span["instance"], "dim"), when, length, Text(bar, colour))
    return table


def draw_bar(start: float, length: float) -> str:
    """Return a bar from cell `start` over `length` cells, precise to an eighth of a cell; never invisible.

    Cells have no glyphs that begin in the middle, so the start is rounded down and the length keeps its value.
    """
    eighths = max(1, round(8 * length))
    return " " * int(start) + _EIGHTHS[8] * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _cells(values: Sequence[float], percentiles: Sequence[int], show: Callable[[float], str]) -> list[str]:
    if not values:
        return ["–"] * len(percentiles)
    return [show(float(value)) for value in np.percentile(values, percentiles)]


def _seconds(value: float) -> str:
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.2f} s"
