"""Limits of repeated work: failures, waits, pauses and deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Final

from common.errors import ErrorInfo, TriptychError

MAX_FAILURES: Final = 3
"""Failures in a row after which the work is given up."""
MAX_WAITS: Final = 10
"""Waits in a row that ended early without memory or result."""
BACKOFF_S: Final = 0.25
"""Pause before a second attempt on the same instances, doubled before a third. Another instance is asked at once."""

Action = Callable[[], Awaitable[None]]


class Deadlines:
    """All deadlines of one job, each with the action that follows. Times are by `time.monotonic`.

    `wake` is called once when the earliest is due; the job then calls `run_due`. Between both, events that came before
    the deadline are handled first.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._pending: dict[Hashable, tuple[float, Action]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __contains__(self, key: Hashable) -> bool:
        return key in self._pending

    def set(self, key: Hashable, due_s: float, action: Action) -> None:
        """Run `action` at `due_s`, in place of any earlier deadline of `key`."""
        self._pending[key] = due_s, action
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(due_s, self._wake)
        elif due_s < self._timer.when():
            self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_at(due_s, self._wake)

    def clear(self, key: Hashable) -> None:
        """Forget the deadline of `key`, if any."""
        self._pending.pop(key, None)

    async def run_due(self, now_s: float) -> None:
        """Run the actions of due deadlines; then wait for the earliest of the rest."""
        try:
            for key, pending in list(self._pending.items()):
                if pending[0] <= now_s and self._pending.get(key) is pending:  # no action before has changed it
                    del self._pending[key]
                    await pending[1]()
        finally:
            self.stop()
            if self._pending:
                due_s = min(due_s for due_s, _ in self._pending.values())
                self._timer = asyncio.get_running_loop().call_at(due_s, self._wake)

    def stop(self) -> None:
        """Wake the job no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


@dataclass
class Retries:
    """Failures and waits in a row for a piece of work, named `what` in errors, with the field `param`."""

    what: str
    param: str | None = None
    failures: int = 0
    waits: int = 0
    failed_on: set[str] = field(default_factory=set)
    """Instances that failed, or could not deliver, since the last success."""

    @property
    def backoff_s(self) -> float:
        """Pause before instances that have just failed are asked again."""
        return BACKOFF_S * 2.0 ** max(0, self.failures - 1)

    def failed(self, instance_id: str, error: ErrorInfo) -> None:
        """Count a failure. Raises `error` in other words after MAX_FAILURES."""
        self.failures += 1
        self.failed_on.add(instance_id)
        if self.failures >= MAX_FAILURES:
            raise self._given_up(self.failures, error)

    def waited(self, error: ErrorInfo, *, in_full: bool = False, undelivered_by: str | None = None) -> None:
        """Count a wait in vain. Raises `error` in other words after MAX_WAITS.

        `undelivered_by` is an instance that could not deliver its result: another instance may have a working route.
        A wait `in_full`, as long as planned, does not count: a burst is no failure and must drain, and the waiting
        request has a deadline of its own. Waits that end at once would repeat without end.
        """
        if undelivered_by is not None:
            self.failed_on.add(undelivered_by)
        self.waits = 0 if in_full else self.waits + 1
        if self.waits >= MAX_WAITS:
            raise self._given_up(self.waits, error)

    def succeeded(self) -> None:
        """Count anew: work that succeeded once may be needed again later."""
        self.failures, self.waits = 0, 0
        self.failed_on.clear()

    def _given_up(self, times: int, last: ErrorInfo) -> TriptychError:
        return TriptychError(last.code, f"{self.what} in {times} attempts; the last: {last.message}", self.param)
