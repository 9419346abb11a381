"""Stacks of all threads and asyncio tasks of a process, written to its log: on SIGUSR1, and before a hang ends it."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any


def dump_on_signal() -> None:
    """Dump all stacks on SIGUSR1; the process goes on. Must be called on the main thread.

    Threads are dumped even where the interpreter is stuck in native code; tasks follow once it runs Python again.
    """
    signal.signal(signal.SIGUSR1, _dump_tasks_of_main_loop)
    with contextlib.suppress(OSError, ValueError):  # no stderr with a descriptor
        faulthandler.register(signal.SIGUSR1, all_threads=True, chain=True)


def dump_stacks() -> None:
    """Write the stacks of all threads, and of all tasks of the running loop. Never fails."""
    with contextlib.suppress(OSError, ValueError):
        faulthandler.dump_traceback(all_threads=True)
    _dump_tasks_of_main_loop()


def _dump_tasks_of_main_loop(number: int = 0, frame: FrameType | None = None) -> None:
    with contextlib.suppress(RuntimeError, OSError, ValueError):  # no loop yet, or a log that cannot be written
        tasks = asyncio.all_tasks()
        lines = [f"Tasks of the event loop: {len(tasks)}"]
        for task in sorted(tasks, key=lambda task: task.get_name()):
            lines.append(f"Task {task.get_name()} (most recent call last):")
            lines += [f"  {where}" for where in _awaits(task.get_coro())]
        sys.stderr.write("\n".join(lines) + "\n")
        sys.stderr.flush()


def _awaits(waiting: Any) -> Iterator[str]:
    """Yield where a coroutine waits, then where the awaited coroutine or generator does, down to a future."""
    while waiting is not None:
        kind = next((kind for kind in ("cr", "gi", "ag") if hasattr(waiting, f"{kind}_frame")), None)
        if kind is None:  # a future, or one turn of an asynchronous generator, known to the collector alone
            waiting = next((held for held in gc.get_referents(waiting) if hasattr(held, "ag_frame")), None)
            continue
        frame: FrameType | None = getattr(waiting, f"{kind}_frame")
        if frame is not None:
            yield f'File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_qualname}'
        waiting = getattr(waiting, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
