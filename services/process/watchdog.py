"""Detection of a hung engine: by the time in one step, counted while the process ran."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from common.errors import TriptychError
from common.process.clocks import AwakeClock
from common.process.stack_dump import dump_stacks
from services.process.engine_thread import EngineThread

POLL_S: Final = 1.0
"""Seconds between two looks; less for a short limit."""


class Watchdog:
    """Looks at the engines of one worker. Neither loading nor time in a stopped process counts.

    A step that does not end within minutes never will, by a kernel, a driver or a lock: only a new process helps.
    """

    def __init__(
        self, threads: Sequence[EngineThread[Any, Any]], limit_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._threads = threads
        self._limit_s = limit_s
        self._poll_s = min(POLL_S, limit_s / 4)
        self._clock = clock
        self._awake = AwakeClock(2 * self._poll_s, clock)
        self._looked_s, self._counted_s = clock(), 0.0
        self._began_s = dict.fromkeys(threads, 0.0)  # begin of the present steps, in counted seconds

    async def watch(self) -> None:
        """Raise TriptychError("unavailable") once an engine hangs, after a dump of all stacks; never return."""
        while True:
            await asyncio.sleep(self._poll_s)
            if (problem := self.look()) is not None:
                dump_stacks()
                raise TriptychError("unavailable", f"{problem}: it has hung")

    def look(self) -> str | None:
        """Return the problem, or None. Counts only time between two looks in close succession."""
        now_s, awake_s = self._clock(), self._awake.look()
        elapsed_s, counted_s = now_s - self._looked_s, awake_s - self._counted_s
        self._looked_s, self._counted_s = now_s, awake_s
        for thread in self._threads:
            busy_s = thread.busy_s
            if busy_s <= elapsed_s:  # the step has begun since the last look, or the engine waits
                self._began_s[thread] = awake_s - min(busy_s, counted_s)
        longest_s = max(awake_s - began_s for began_s in self._began_s.values())
        return f"the engine has been in one step for {longest_s:.0f} s" if longest_s > self._limit_s else None
