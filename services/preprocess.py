"""Preprocessing of media in processes of its own, off the loop: a bad item can take down a helper, never the worker."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING

from common.errors import TriptychError
from common.messages import MediaKind
from common.telemetry import get_logger
from services.preprocess_child import initialize, process_item

if TYPE_CHECKING:
    from engine.processors import ProcessedInput

log = get_logger()


class PreprocessPool:
    """`num_workers` spawned processes. Items wait here, not inside the pool, so that one can still be cancelled."""

    def __init__(self, model: str, dtype: str, num_workers: int, timeout_s: float) -> None:
        """`timeout_s` bounds one item once it has begun."""
        self._arguments = (os.getpid(), model, dtype)
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._executor, self._warming = self._start()
        self._slots = asyncio.Semaphore(num_workers)
        self._suspects = asyncio.Lock()
        self.num_waiting = 0
        self.num_crashes = 0

    async def warm_up(self, timeout_s: float) -> None:
        """Return once the processes, begun when this was made, are up and have their model's processor loaded.

        Raises TriptychError("unavailable") where they are not within `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*map(asyncio.wrap_future, self._warming))
        except (TimeoutError, BrokenProcessPool) as error:
            message = f"the preprocessing processes did not come up within {timeout_s:g} s: {error!r}"
            raise TriptychError("unavailable", message) from error

    async def process(self, kind: MediaKind, media: bytes) -> ProcessedInput:
        """Preprocess one item.

        If the pool crashes meanwhile, the item is tried once more, alone, so that a crash is blamed on the right one.
        Raises TriptychError: "bad_media" as `engine.processors.process` does, and where the item takes down its
        process or takes longer than the limit.
        """
        try:
            return await self._attempt(kind, media)
        except BrokenProcessPool:
            async with self._suspects:
                try:
                    return await self._attempt(kind, media)
                except BrokenProcessPool as error:
                    message = f"preprocessing this {kind} of {len(media)} bytes crashed its process twice"
                    raise TriptychError("bad_media", message) from error

    def close(self) -> None:
        """End the processes at once."""
        self._kill(self._executor)
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _kill(self, executor: ProcessPoolExecutor) -> None:
        for child in list((executor._processes or {}).values()):  # its own shutdown would wait for them
            child.kill()

    async def _attempt(self, kind: MediaKind, media: bytes) -> ProcessedInput:
        self.num_waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.num_waiting -= 1
        executor = self._executor
        try:
            work = executor.submit(process_item, kind, media)
        except BrokenProcessPool:
            self._slots.release()
            self._rebuild(executor)
            raise
        # Slot and time limit belong to the work, not to its caller, who may give up long before the process does.
        loop = asyncio.get_running_loop()
        overdue = loop.call_later(self._timeout_s, self._rebuild, executor)
        started_s = loop.time()

        def finish() -> None:
            overdue.cancel()
            self._slots.release()

        work.add_done_callback(lambda _: _call_on(loop, finish))
        try:
            return await asyncio.wrap_future(work)
        except BrokenProcessPool as error:
            if loop.time() - started_s >= self._timeout_s:
                message = f"preprocessing this {kind} of {len(media)} bytes took longer than {self._timeout_s:g} s"
                raise TriptychError("bad_media", message) from error
            self._rebuild(executor)
            raise

    def _rebuild(self, broken: ProcessPoolExecutor) -> None:
        if broken is not self._executor:
            return  # another item has done it
        self.num_crashes += 1
        log.warning("starting the preprocessing processes again", crashes=self.num_crashes)
        self._kill(broken)
        broken.shutdown(wait=False)  # what was in it ends with BrokenProcessPool
        self._executor, self._warming = self._start()

    def _start(self) -> tuple[ProcessPoolExecutor, list[Future[int]]]:
        executor = ProcessPoolExecutor(
            self._num_workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=initialize,
            initargs=self._arguments,
        )
        # Processes start with the first calls, and the first picture should not wait for them.
        return executor, [executor.submit(os.getpid) for _ in range(self._num_workers)]


def _call_on(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has closed
        loop.call_soon_threadsafe(callback)
