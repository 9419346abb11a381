"""A process that runs several stages in turn, so that what they all need is started once.

It is told of each stage by a line of JSON on its standard input, {"words": […], "log": "…"}, and answers with a line:
the exit status and, where it cannot go on after this one, a word behind it. A process that ends, or has to be ended,
takes no other stage with it: the next one has a new one. Standard library alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tools.gpu_check.layout import ROOT

_KILL_S: Final = 10.0


class Host:
    """The process of one command, there from the first stage on. Ended, with all that it has started, by `close`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command, self._environment = list(command), dict(environment)
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, words: Sequence[str], log: Path, limit_s: float) -> int | None:
        """The exit status of one stage; None if the time was up. `log` gets what it prints."""
        log.write_bytes(b"")
        deadline_s = time.monotonic() + limit_s
        process = self._process = self._process or self._start(log)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: so says the answer
            process.stdin.write(json.dumps({"words": [*words], "log": str(log)}).encode() + b"\n")
            process.stdin.flush()
        answer = _line(process, deadline_s)
        status, *goodbye = (answer or b"").split()[:2] or [b""]
        if goodbye or not status:
            self.close()
        if status:
            return int(status)
        return None if answer is None else process.returncode or 1

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            end_group(process)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()

    def _start(self, log: Path) -> subprocess.Popen[bytes]:
        """What it says before it listens is in the log of its first stage."""
        with log.open("ab") as errors:
            return subprocess.Popen(
                self._command,
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def end_group(process: subprocess.Popen[bytes]) -> None:
    """It leads a process group of its own: its children go with it."""
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):  # a driver may take its time with the dead
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(_KILL_S)


def _line(process: subprocess.Popen[bytes], deadline_s: float) -> bytes | None:
    """The next line that a process says; empty at its end, None when the time is up."""
    assert process.stdout is not None
    said = b""
    while not said.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline_s - time.monotonic()))
        if not ready:
            return None
        more = os.read(process.stdout.fileno(), 1024)
        if not more:
            return b""
        said += more
    return said
