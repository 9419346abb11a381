"""How often a piece of work is tried again, after what, and how soon."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from common.errors import ErrorInfo, TriptychError

MAX_FAILURES: Final = 3
"""Failures in a row after which the work is given up."""
MAX_WAITS: Final = 10
"""Waits in a row that ended without room or result before their time."""
BACKOFF_S: Final = 0.25
"""Before a second attempt where there is nobody else to ask, doubled before a third; another one is asked at once."""


@dataclass
class Retries:
    """The failures and the waits in a row of one piece of work. `what` names it in errors, `param` is its field."""

    what: str
    param: str | None = None
    failures: int = 0
    waits: int = 0
    failed_on: set[str] = field(default_factory=set)
    """Instances that have failed, or could not deliver, since it last succeeded."""

    @property
    def backoff_s(self) -> float:
        """How long to leave those alone that have just failed."""
        return BACKOFF_S * 2.0 ** max(0, self.failures - 1)

    def failed(self, instance_id: str, error: ErrorInfo) -> None:
        """Count a failure. Raises `error` in other words after MAX_FAILURES."""
        self.failures += 1
        self.failed_on.add(instance_id)
        if self.failures >= MAX_FAILURES:
            raise self._given_up(self.failures, error)

    def waited(self, error: ErrorInfo, *, in_full: bool = False, undelivered_by: str | None = None) -> None:
        """Count a wait in vain. Raises `error` in other words after MAX_WAITS.

        Where an instance could not deliver what it had, another one may have a way that works.

        One `in_full`, as long as it was meant to be, is not counted: in a burst that is nobody's fault, it must drain,
        and whoever waits has a deadline of its own. Those that end at once would not end otherwise.
        """
        if undelivered_by is not None:
            self.failed_on.add(undelivered_by)
        self.waits = 0 if in_full else self.waits + 1
        if self.waits >= MAX_WAITS:
            raise self._given_up(self.waits, error)

    def succeeded(self) -> None:
        """Begin to count anew: what has worked once may be wanted again later."""
        self.failures, self.waits = 0, 0
        self.failed_on.clear()

    def _given_up(self, times: int, last: ErrorInfo) -> TriptychError:
        return TriptychError(last.code, f"{self.what} in {times} attempts; the last: {last.message}", self.param)
