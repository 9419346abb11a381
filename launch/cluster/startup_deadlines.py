"""Deadlines for instances: to join the cluster, and to give a sign of life."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final

from common.process.clocks import AwakeClock
from launch.cluster.instance import Instance, State

LOOK_S: Final = 3.0
"""Looks that are further apart lie in a time in which this process did not run either: an HTTP probe takes two."""
_STARTING: Final[tuple[State, ...]] = ("starting", "switching")


class StartupDeadlines:
    """The check for overdue instances in a running cluster: no other process would ever end them.

    A process that is stopped, or holds the interpreter's lock, says nothing at all: it is given `silence_s` from its
    last sign of life, as long as a start may take, for a worker that changes its role starts without a word.

    A start is over with the entry in the registry: to be ready takes others, too. Time without a broker does not count.
    """

    def __init__(self, start_timeout_s: float, silence_s: float) -> None:
        self._start_timeout_s = start_timeout_s
        self._silence_s = silence_s
        self._awake = AwakeClock(LOOK_S)
        self._looked_s = self._away_s = 0.0  # of the awake clock: the last look, and how long the broker was away
        # By instance id and when its process was started, or changed its role:
        self._began_s: dict[tuple[str, float], float] = {}
        self._heard_s: dict[tuple[str, float], float] = {}

    def look(
        self, instances: Sequence[Instance], heard: Collection[str], *, broker_away: bool
    ) -> Iterator[tuple[Instance, str]]:
        """Yield overdue instances with the reason. `heard` are the ids of instances with a recent sign of life;
        `broker_away` says whether the registry was unreadable."""
        now_s, began, before = self._awake.look(), self._began_s, self._heard_s
        if broker_away:
            self._away_s += now_s - self._looked_s
        self._looked_s = now_s
        joinable_s = now_s - self._away_s
        self._began_s, self._heard_s = {}, {}
        for one in instances:
            if one.pid is None:
                continue
            life = (one.id, one.started_s)
            began_s = self._began_s[life] = began.get(life, joinable_s)
            heard_s = self._heard_s[life] = now_s if one.id in heard else before.get(life, now_s)
            starting = one.state in _STARTING and not one.joined
            if starting and joinable_s - began_s > self._start_timeout_s:
                yield one, f"it did not join the cluster within {self._start_timeout_s:g} s"
            elif not starting and now_s - heard_s > self._silence_s:
                yield one, f"it has said nothing for {self._silence_s:g} s"
