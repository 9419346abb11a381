"""Output of `triptych serve`: progress of the start, the table of instances, deaths and returns."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from launch.cluster.instance import Instance, Reporter

FILE_WIDTH = 160


def make_console(file: TextIO | None = None) -> Console:
    """Return a console for the terminal, or for a file or pipe, with lines of any length for tools."""
    console = Console(file=file)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = FILE_WIDTH
    return console


class ConsoleReporter(Reporter):
    """Tells a person at a terminal; in a log file the same lines appear without the animation."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._live: Live | None = None
        self._missing: list[str] = []
        self._has_begun = False

    def starting(self, instances: Sequence[Instance], logs: Path) -> None:
        self._has_begun, self._missing = True, [instance.id for instance in instances]
        self._console.print(f"logs: {logs}", style="dim", highlight=False, soft_wrap=True)

    def waiting(self, instances: Sequence[Instance], elapsed_s: float) -> None:
        for instance in instances:
            if instance.state == "ready" and instance.id in self._missing:
                self._console.print(f"[green]✓[/] {instance.id} ready after {elapsed_s:.1f} s", highlight=False)
        self._missing = [instance.id for instance in instances if instance.awaited]
        text = f"{self._title}: waiting for {', '.join(self._missing)} · {elapsed_s:.1f} s"
        if self._console.is_terminal:
            if self._live is None:
                self._live = Live(console=self._console, transient=True, refresh_per_second=10)
                self._live.start()
            self._live.update(Spinner("dots", text))

    def started(self, instances: Sequence[Instance], base_url: str, elapsed_s: float) -> None:
        self._end_live()
        self._missing = []
        self._console.print()
        self._console.print(instance_table(instances, f"{self._title}: ready in {elapsed_s:.1f} s"))

    def event(self, text: str, *, good: bool | None = None, log_tail: str = "", then: str = "") -> None:
        mark = {True: "[green]✓[/] ", False: "[red]✗[/] ", None: ""}[good]
        self._console.print(f"{mark}{escape(text)}", highlight=False)
        for line in log_tail.splitlines():
            self._console.print(f"    {escape(line)}", highlight=False, style="dim")
        if then:
            self._console.print(f"  {then}", highlight=False)

    def stopping(self, instances: Sequence[Instance]) -> None:
        self._end_live()
        if instances:
            names, awaited = ", ".join(instance.id for instance in instances), ", ".join(self._missing)
            why = f", still waiting for {awaited}" if awaited else ""
            text = f"stopping {names}{why} (Ctrl-C again kills at once)"
            self._console.print(text, style="dim", highlight=False, soft_wrap=True)

    def stopped(self, killed: Sequence[str], kept_logs: str | None) -> None:
        if killed:
            self._console.print(f"[yellow]killed[/], did not stop in time: {', '.join(killed)}", highlight=False)
        if kept_logs is not None:
            self._console.print(f"logs are kept in {kept_logs}", highlight=False)
        if self._has_begun:
            self._console.print("stopped", style="dim")

    def _end_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def make_table(title: str, columns: Sequence[str]) -> Table:
    """Return an empty table without lines."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", header_style="dim")
    return table


def instance_table(instances: Sequence[Instance], title: str) -> Table:
    """Return a table with a row per instance: id, role, process, addresses, state."""
    table = make_table(title, ("id", "role", "pid", "http", "requests", "tensors", "state"))
    for i in instances:
        addresses = (i.http_address, i.requests_address, i.tensor_address.partition(" ")[0])
        bare = (address.rpartition("://")[2] or "–" for address in addresses)
        table.add_row(
            i.id, i.role, str(i.pid or "–"), *bare, Text(i.state, "green" if i.state == "ready" else "yellow")
        )
    return table
