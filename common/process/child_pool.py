"""Work on data of untrusted clients in separate processes: a bad item can end a helper, never the service.

A helper has a memory limit and a time limit, ends with its parent, ends first when the system runs out of memory, and
writes no core dump. The death of a helper ends all helpers. Their items are tried once more, each item alone, so that a
crash is blamed on the right item.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar, cast

from common.errors import TriptychError
from common.process import malloc
from common.process.lifetime import die_with_parent
from common.telemetry import get_logger

MEDIA_NICENESS: Final = 10
"""Of threads that work on media: decoders on the same cores come first. A tenth of a contested core is left."""
START_S: Final = 30.0
"""How much longer an item may take in processes that are still starting."""
P = ParamSpec("P")
T = TypeVar("T")
log = get_logger()


class ChildPool:
    """A pool of `num_workers` spawned processes. Waiting items stay outside of the executor, and can be cancelled."""

    def __init__(
        self,
        initialize: Callable[[], None],
        *,
        work: str,
        num_workers: int,
        timeout_s: float,
        memory_bytes: int,
        on_crash: Callable[[], object] = lambda: None,
    ) -> None:
        """Start the processes. Each begins with `initialize()`; `work` names the pool's task in messages.

        `timeout_s` bounds an item from its start, beside the start of its process; `memory_bytes` bounds its memory
        beyond an idle process. `on_crash` is called on the loop when a process has died, or has taken too long.
        """
        self._initializer = (memory_bytes, os.getpid(), initialize)
        self._work = work
        self._num_workers = num_workers
        self._on_crash = on_crash
        self._timeout_s = timeout_s
        self._executor, self._warming = self._start()
        self._slots = asyncio.Semaphore(num_workers)
        self._suspects = asyncio.Lock()
        self.num_waiting = 0
        self.num_crashes = 0

    async def warm_up(self, timeout_s: float) -> None:
        """Return once all processes are initialized. Raises TriptychError("unavailable") after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(asyncio.gather(*map(asyncio.wrap_future, self._warming)))
        except (TimeoutError, BrokenProcessPool) as error:
            message = f"the {self._work} processes did not come up within {timeout_s:g} s: {error!r}"
            raise TriptychError("unavailable", message) from error

    async def run(self, item: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of `function` for an item; messages name the item `item`.

        Raises the errors of `function`, and TriptychError("bad_media") for an item that takes down its process twice or
        exceeds a limit.
        """
        call = functools.partial(function, *args, **kwargs)
        try:
            return await self._attempt(item, call)
        except BrokenProcessPool:
            async with self._suspects:
                try:
                    return await self._attempt(item, call, num_slots=self._num_workers)
                except BrokenProcessPool as error:
                    raise TriptychError("bad_media", f"{self._work} {item} crashed its process twice") from error

    def close(self) -> None:
        """End the processes at once."""
        self._kill(self._executor)
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _kill(self, executor: ProcessPoolExecutor) -> None:
        for child in list((executor._processes or {}).values()):  # shutdown would wait for them
            child.kill()
        # A process that dies within a result leaves the thread that reads it waiting for the rest, for as long as any
        # end to write to is open.
        if (results := executor._result_queue) is not None:
            cast(Any, results)._writer.close()

    async def _acquire(self, num_slots: int) -> None:
        """Wait for `num_slots` slots; only a single caller at a time may wait for several."""
        num_acquired = 0
        self.num_waiting += 1
        try:
            while num_acquired < num_slots:
                await self._slots.acquire()
                num_acquired += 1
        except BaseException:
            self._release(num_acquired)
            raise
        finally:
            self.num_waiting -= 1

    def _release(self, num_slots: int) -> None:
        for _ in range(num_slots):
            self._slots.release()

    async def _attempt(self, item: str, call: Callable[[], T], num_slots: int = 1) -> T:
        await self._acquire(num_slots)
        executor = self._executor
        try:
            work = executor.submit(_run_in_child, call)
        except BrokenProcessPool:
            self._release(num_slots)
            self._rebuild(executor)
            raise
        # Slot and time limit belong to the work, not to its caller, who may give up long before the process does.
        loop = asyncio.get_running_loop()
        is_warm = all(future.done() for future in self._warming)
        limit_s = self._timeout_s if is_warm else self._timeout_s + START_S
        overdue = loop.call_later(limit_s, self._rebuild, executor)
        started_s = loop.time()
        work.add_done_callback(lambda _: self._end_item(loop, overdue, num_slots))
        try:
            return await asyncio.shield(asyncio.wrap_future(work))  # an executor cannot end with cancelled items in it
        except BrokenProcessPool as error:
            if loop.time() - started_s >= limit_s:
                message = f"{self._work} {item} took longer than {limit_s:g} s"
                raise TriptychError("bad_media", message) from error
            self._rebuild(executor)
            raise
        except MemoryError as error:
            limit = f"{self._initializer[0] / 2**20:g} MiB"
            raise TriptychError("bad_media", f"{self._work} {item} takes more memory than {limit}") from error

    def _end_item(self, loop: asyncio.AbstractEventLoop, overdue: asyncio.TimerHandle, num_slots: int) -> None:
        """Release what an item holds. Called by a thread of the executor."""
        with contextlib.suppress(RuntimeError):  # the loop has closed
            loop.call_soon_threadsafe(overdue.cancel)
            loop.call_soon_threadsafe(self._release, num_slots)

    def _rebuild(self, broken: ProcessPoolExecutor) -> None:
        if broken is not self._executor:
            return  # another item has done it
        self.num_crashes += 1
        self._on_crash()
        log.warning("starting processes again", work=self._work, crashes=self.num_crashes)
        self._kill(broken)
        broken.shutdown(wait=False)  # items in the pool end with BrokenProcessPool
        self._executor, self._warming = self._start()

    def _start(self) -> tuple[ProcessPoolExecutor, list[Future[int]]]:
        executor = ProcessPoolExecutor(
            self._num_workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_begin_child,
            initargs=self._initializer,
        )
        # Processes start with the first calls, and the first item should not wait for them.
        return executor, [executor.submit(os.getpid) for _ in range(self._num_workers)]


def _begin_child(memory_bytes: int, parent_pid: int, initialize: Callable[[], None]) -> None:
    """Initialize a new helper, then let it take `memory_bytes` of address space beyond its size: beyond that limit
    follows a MemoryError or the end. The terminal's Ctrl-C ends the parent alone, the helper ends with it.
    """
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(MEDIA_NICENESS)
    initialize()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it would hold a client's image
    with contextlib.suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        limit = pages * os.sysconf("SC_PAGE_SIZE") + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit if most < 0 else min(limit, most), most))
        Path("/proc/self/oom_score_adj").write_text("1000")  # rather this one than the service


def _run_in_child(call: Callable[[], T]) -> T:
    """Return the result of `call`; afterwards free memory goes back to the system, however large the item was."""
    try:
        return call()
    finally:
        malloc.return_free_pages()
