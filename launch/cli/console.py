"""Output of `triptych serve`: progress of the start, the table of instances, deaths and returns; a stream for it."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TextIO

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from common.process.start_phase import STARTING
from launch.cluster.instance import Instance, Reporter

FILE_WIDTH = 160
MAX_PIECES: Final = 1000
"""Kept for a reader that is slow; what comes while there are so many is lost."""


def make_console(file: TextIO | None = None) -> Console:
    """Return a console for the terminal, or for a file or pipe, with lines of any length for tools."""
    console = Console(file=file)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = FILE_WIDTH
    return console


class NonblockingStream:
    """A writer to the file behind a stream, on a separate thread; never raises and never blocks.

    A slow or missing reader, or a full disk, loses text.
    """

    def __init__(self, stream: TextIO) -> None:
        """Start the thread. Raises io.UnsupportedOperation for a stream without a file."""
        self._stream = stream
        self._descriptor = stream.fileno()
        self.encoding = stream.encoding or "utf-8"
        self._pieces: queue.Queue[str | None] = queue.Queue(MAX_PIECES)
        self._thread = threading.Thread(target=self._write, name="output", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        with contextlib.suppress(queue.Full):
            self._pieces.put_nowait(text)
        return len(text)

    def flush(self) -> None:
        """Do nothing: `close` waits."""

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._descriptor

    def close(self, timeout_s: float = 1.0) -> None:
        """Wait shortly for unwritten text."""
        with contextlib.suppress(queue.Full):
            self._pieces.put_nowait(None)
            self._thread.join(timeout_s)

    def _write(self) -> None:
        while (text := self._pieces.get()) is not None:
            data = text.encode(self.encoding, "replace")
            with contextlib.suppress(OSError):
                while data:
                    data = data[os.write(self._descriptor, data) :]


class ConsoleReporter(Reporter):
    """Tells a person at a terminal; in a log file the same lines appear without the animation."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._status = console.status("", spinner_style="")
        self._missing: list[str] = []
        self._phases: dict[str, str] = {}
        self._has_begun = False

    def starting(self, instances: Sequence[Instance], logs: Path) -> None:
        self._has_begun, self._missing = True, [instance.id for instance in instances]
        self._console.print(f"logs: {logs}", style="dim", highlight=False, soft_wrap=True)

    def waiting(self, instances: Sequence[Instance], elapsed_s: float) -> None:
        for instance in instances:
            if instance.state == "ready" and instance.id in self._missing:
                self._console.print(f"[green]✓[/] {instance.id} ready after {elapsed_s:.1f} s", highlight=False)
        awaited = [instance for instance in instances if instance.awaited]
        self._missing = [instance.id for instance in awaited]
        phases = {instance.id: instance.phase for instance in awaited}
        if self._console.is_terminal:
            waits = ", ".join(f"{name} ({phase})" for name, phase in phases.items())
            self._status.update(f"{self._title}: waiting for {waits} · {elapsed_s:.1f} s")
            self._status.start()
            return
        for name, phase in phases.items():
            bare = phase.rstrip(" %0123456789")  # a line for each phase, none for each step of it
            if bare not in (STARTING, self._phases.get(name)):
                self._phases[name] = bare
                self._console.print(f"{name}: {bare} · {elapsed_s:.1f} s", highlight=False)

    def started(self, instances: Sequence[Instance], base_url: str, elapsed_s: float) -> None:
        self._status.stop()
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
        self._status.stop()
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
