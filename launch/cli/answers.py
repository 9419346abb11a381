"""Answers on the terminal: finished answers above, answers in progress and a bar below."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from launch.cli.client import ClientRequest, ClientResult

_SHOWN_IN_PROGRESS = 8


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
