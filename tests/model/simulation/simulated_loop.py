"""An event loop without sockets or threads whose clock moves only when it is told to."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import Any
from unittest.mock import patch

EPOCH_S = 1_700_000_000.0
"""The time at which simulations begin."""


class SimulatedLoop(asyncio.AbstractEventLoop):
    """Runs callbacks and tasks in the order in which they became ready; never waits.

    `errors` are exceptions that nobody caught.
    """

    def __init__(self) -> None:
        self.now_s = EPOCH_S
        self.errors: list[BaseException] = []
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count()

    # --- what a simulation drives

    def settle(self) -> None:
        """Run everything that can run without time going on. Raises the first exception that nobody caught."""
        asyncio._set_running_loop(self)
        try:
            while self._ready:
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            asyncio._set_running_loop(None)
        if self.errors:
            raise self.errors[0]

    def next_timer_s(self) -> float | None:
        """When something will become ready by itself."""
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def advance_to(self, now_s: float) -> None:
        """Let time go on, through every timer on the way."""
        while (timer_s := self.next_timer_s()) is not None and timer_s <= now_s:
            self.now_s = max(self.now_s, timer_s)
            while self._timers and self._timers[0][0] <= self.now_s:
                self._ready.append(heapq.heappop(self._timers)[2])
            self.settle()
        self.now_s = max(self.now_s, now_s)
        self.settle()

    @contextmanager
    def clocks(self) -> Iterator[None]:
        """Meanwhile `time.monotonic()` and, far from it, `time.time()` are this loop's for whoever asks in this thread.

        Other threads of the process, as those that watch over the helpers of an earlier test, keep their clocks: one
        that saw these jump would end with an OverflowError.
        """
        own, wall_s, monotonic_s = threading.get_ident(), time.time, time.monotonic

        def time_now() -> float:
            return self.now_s + EPOCH_S if threading.get_ident() == own else wall_s()

        def monotonic_now() -> float:
            return self.now_s if threading.get_ident() == own else monotonic_s()

        with patch.object(time, "time", time_now), patch.object(time, "monotonic", monotonic_now):
            yield

    # --- what asyncio asks of a loop

    def time(self) -> float:
        return self.now_s

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # there are no threads here

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.now_s + delay, callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Context | None = None) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def run_in_executor(self, executor: object, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """What threads do for the loop is done at once."""
        done = self.create_future()
        done.set_result(func(*args))
        return done

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(context.get("exception") or RuntimeError(context["message"]))

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return asyncio._get_running_loop() is self

    def is_closed(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers are passed over by `next_timer_s`."""
