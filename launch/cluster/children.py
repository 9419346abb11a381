"""Child processes, each with a process group, a log file and a lifeline to this process; delays of a new start."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from common.errors import TriptychError

_POLL_S = 0.02
_TAIL_LINES, _TAIL_BYTES = 15, 2**14
_PR_SET_CHILD_SUBREAPER = 36
CLEAN_STOP_S = 3.0
"""How long a child may take for a clean stop once its parent is gone."""


@dataclass(frozen=True)
class Command:
    """The start of a child: arguments, whole environment and the file for all output."""

    argv: list[str]
    environment: dict[str, str]
    log: Path


@dataclass(eq=False, repr=False)
class Child:
    """A running child process. Terminal signals do not reach the child: this process decides about the stop."""

    _command: Command
    _process: asyncio.subprocess.Process

    @classmethod
    async def start(cls, command: Command) -> Child:
        """Start the process; all output is appended to the log.

        Raises TriptychError("internal_error") where the operating system refuses.
        """
        # Linux shares cores among sessions first, then by niceness. uvloop, as in Ray, knows no process_group.
        plain = isinstance(asyncio.get_running_loop(), asyncio.BaseEventLoop)
        try:
            command.log.parent.mkdir(0o700, exist_ok=True)  # whoever tidies up temporary files may have removed it
            with command.log.open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    *command.argv,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=command.environment,
                    **({"process_group": 0} if plain else {"start_new_session": True}),
                )
        except OSError as error:
            raise TriptychError("internal_error", f"cannot start {' '.join(command.argv)}: {error}") from error
        return cls(command, process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    @property
    def ended_well(self) -> bool:
        return self._process.returncode == 0

    async def wait(self) -> str:
        """Wait for the end and return the manner in words. Processes started by the child are ended, too."""
        code = await self._process.wait()
        await end_group(self.pid)
        return describe_exit(code)

    def terminate(self) -> None:
        """Ask for a clean stop."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the process at once; `wait` ends the processes started by the child."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal by process id: the process object would take the exit status away from the waiting thread."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def log_tail(self) -> str:
        """Return the last lines written by the process; an empty text without a log."""
        with contextlib.suppress(OSError), self._command.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:])
        return ""


async def end_group(group: int, grace_s: float = 1.5) -> None:
    """End the rest of a process group without leader: SIGTERM, then SIGKILL after a moment.

    Not SIGKILL at once: Python's resource tracker lives in the group, ignores SIGTERM, and removes the semaphores
    of a killed process from /dev/shm before it ends by itself.
    """
    deadline = asyncio.get_running_loop().time() + grace_s
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGTERM)
        while _has_living(group):
            if asyncio.get_running_loop().time() > deadline:
                os.killpg(group, signal.SIGKILL)
                return
            await asyncio.sleep(_POLL_S)


def _has_living(group: int) -> bool:
    """Return whether a process of the group still runs. Raises ProcessLookupError for an empty group.

    Signal 0 counts zombies, too, which a container's first process may never collect: those are collected here where
    they are ours (`adopt_orphans`), and not counted where /proc tells.
    """
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
    os.killpg(group, 0)
    try:
        return any(_is_living_member(entry, group) for entry in os.listdir("/proc") if entry.isdigit())
    except OSError:
        return True  # no /proc on this system


def _is_living_member(pid: str, group: int) -> bool:
    try:
        state, _, of_group = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:3]
    except (OSError, ValueError):
        return False  # it has just ended
    return int(of_group) == group and state not in "ZX"


def adopt_orphans() -> None:
    """Adopt the orphans of a killed child, to collect their exit statuses.

    Only where the whole process is ours, as in `triptych serve`. Does nothing elsewhere than on Linux.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def describe_exit(code: int) -> str:
    """`exit code 1`, or `killed by SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


@dataclass
class Backoff:
    """Exponential back-off: doubles with each early death, starts over once a process has lived a while."""

    first_s: float = 0.5
    longest_s: float = 30.0
    healthy_after_s: float = 60.0
    _next_s: float = 0.0

    def after_life_of(self, lived_s: float) -> float:
        """Return the seconds to wait after a process with a life of `lived_s`."""
        early = self._next_s > 0.0 and lived_s < self.healthy_after_s
        delay_s = self._next_s if early else self.first_s
        self._next_s = min(2 * delay_s, self.longest_s)
        return delay_s


def follow_parent() -> None:
    """Stop this process when the pipe at descriptor 0 ends; the living parent holds the pipe open.

    A pipe works after SIGKILL of the parent too, on every Unix, and whichever thread of the parent started us. After
    too long a time for a clean stop the process ends by force, helpers included.
    """

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(CLEAN_STOP_S)  # not a synchronisation: if the clean stop works, this thread ends with the process
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
