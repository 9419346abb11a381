"""Instances that take too long: to become ready, or to give any sign of life."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final

from common.awake import AwakeClock
from launch.instance import Instance, State

LOOK_S: Final = 3.0
"""Looks that are further apart lie in a time in which this process did not run either: an HTTP probe takes two."""
_STARTING: Final[tuple[State, ...]] = ("starting", "switching")


class Overdue:
    """Finds them among the instances of a cluster, once that runs: nobody else would ever end them.

    An engine that hangs is noticed by its own process. One that holds the interpreter's lock meanwhile, and a process
    that somebody has stopped, say nothing at all: they are given `silence_s` from their last sign of life. That has to
    be as long as a start may take, for a worker that changes its role starts without a word.
    """

    def __init__(self, start_timeout_s: float, silence_s: float) -> None:
        self._start_timeout_s = start_timeout_s
        self._silence_s = silence_s
        self._awake = AwakeClock(LOOK_S)
        self._seen_s: dict[tuple[str, int | None], float] = {}  # by instance id and pid

    def look(self, instances: Sequence[Instance], heard: Collection[str]) -> Iterator[tuple[Instance, str]]:
        """Who is, and why. `heard` are the ids of those that have just given a sign of life."""
        now_s, before = self._awake.look(), self._seen_s
        self._seen_s = {}
        for one in instances:
            if one.pid is None:
                continue
            life = (one.id, one.pid)
            since_s = self._seen_s[life] = now_s if one.id in heard else before.get(life, now_s)
            if one.state in _STARTING and one.age_s > self._start_timeout_s:
                yield one, f"it was not ready within {self._start_timeout_s:g} s"
            elif one.state not in _STARTING and now_s - since_s > self._silence_s:
                yield one, f"it has said nothing for {self._silence_s:g} s"
