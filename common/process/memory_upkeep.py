"""Upkeep of memory in a process that runs for weeks."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Final, NoReturn

from common.process import malloc
from common.telemetry import get_logger

TIDY_S: Final = 30.0
"""Interval between two returns of free memory."""
IDLE_S: Final = 0.3
"""Idle time after which a process returns the memory of a burst."""

_running: Final[set[asyncio.Task[NoReturn]]] = set()

log = get_logger()


def begin(keep_bytes: int = 0, is_idle: Callable[[], bool] | None = None) -> None:
    """Call `settle` now, and run `tidy_up` as long as the running loop lives. A failure is logged."""
    settle()
    task = asyncio.get_running_loop().create_task(tidy_up(keep_bytes, is_idle=is_idle))
    _running.add(task)
    task.add_done_callback(_note_end)


def _note_end(task: asyncio.Task[NoReturn]) -> None:
    _running.discard(task)
    if not task.cancelled():
        log.error("free memory is not given back any more", error=repr(task.exception()))


def settle() -> None:
    """Spare the garbage collector all present objects. Call this once all long-lived objects are loaded.

    Modules of PyTorch and transformers are some 200,000 objects. A full collection over all of them stops every thread
    for 0.1 to 0.4 s.
    """
    gc.collect()
    gc.freeze()


async def tidy_up(keep_bytes: int = 0, every_s: float = TIDY_S, is_idle: Callable[[], bool] | None = None) -> NoReturn:
    """Collect circular garbage at intervals, and return free memory, but `keep_bytes` at the end of each heap
    (malloc.return_free_pages). The same happens once `is_idle` has been true for IDLE_S after work.

    By itself a full collection comes only after some 80,000 more objects; in a settled process it takes milliseconds.
    """
    clock = asyncio.get_running_loop().time
    due_s, worked_s, is_tidy = clock() + every_s, clock(), True
    while True:
        await asyncio.sleep(every_s if is_idle is None else min(every_s, IDLE_S / 2))
        now_s = clock()
        if is_idle is not None and not is_idle():
            worked_s, is_tidy = now_s, False
        if now_s >= due_s:
            gc.collect()
            due_s = now_s + every_s
        elif is_tidy or now_s - worked_s < IDLE_S:
            continue
        await asyncio.to_thread(malloc.return_free_pages, keep_bytes)
        is_tidy = True
