"""Who takes too long to start, or says nothing: by a supervisor's own time."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from common.process.clocks import AwakeClock
from launch.cluster import startup_deadlines
from launch.cluster.children import Command
from launch.cluster.instance import Instance, State
from launch.cluster.startup_deadlines import LOOK_S, StartupDeadlines


class Watch:
    """An `StartupDeadlines` of 100 s to start and 30 s of silence, whose clock the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(startup_deadlines, "AwakeClock", lambda gap_s: AwakeClock(gap_s, lambda: self.now_s))
        self.overdue = StartupDeadlines(100.0, 30.0)

    def look(
        self,
        *instances: Instance,
        heard: set[str] | None = None,
        after_s: float = 1.0,
        broker_away: bool = False,
    ) -> dict[str, str]:
        self.now_s += after_s
        found = self.overdue.look(instances, heard or set(), broker_away=broker_away)
        return {one.id: why for one, why in found}

    def is_quiet(self, count: int, one: Instance, **look: Any) -> None:
        """Look so many times, a second apart, and find nothing."""
        for _ in range(count):
            assert self.look(one, **look) == {}


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def instance(state: State = "ready", *, started_s: float = 0.0, epoch: int | None = None) -> Instance:
    """Joined in this life if it has an epoch."""
    child = Mock(pid=1, running=True)
    command = Command(["--role", "decode"], {}, Path())
    return Instance("d0", "decode", command, state, child, started_s, epoch=epoch)


@pytest.mark.parametrize("state", ["starting", "switching"])
def test_a_start_that_takes_too_long_is_ended(watch: Watch, state: State) -> None:
    one = instance(state)
    watch.is_quiet(101, one)
    assert watch.look(one) == {"d0": "it did not join the cluster within 100 s"}


@pytest.mark.parametrize("state", ["starting", "switching"])
def test_who_has_joined_may_wait_for_the_others_for_ever_but_not_in_silence(watch: Watch, state: State) -> None:
    one = instance(state)
    watch.is_quiet(50, one)
    one.epoch = 7
    watch.is_quiet(1000, one, heard={"d0"})
    watch.is_quiet(30, one)
    assert watch.look(one) == {"d0": "it has said nothing for 30 s"}


def test_another_role_is_another_start(watch: Watch) -> None:
    one = instance(epoch=7)
    watch.is_quiet(1000, one, heard={"d0"})
    one.take_role("prefill")
    one.state = "switching"
    watch.is_quiet(101, one)
    assert watch.look(one) == {"d0": "it did not join the cluster within 100 s"}


def test_the_supervisors_own_absence_is_no_part_of_a_start(watch: Watch) -> None:
    one = instance("starting")
    assert watch.look(one) == {}
    assert watch.look(one, after_s=3600.0) == {}
    watch.is_quiet(100 - int(LOOK_S), one)
    assert watch.look(one)


@pytest.mark.parametrize("state", ["starting", "switching"])
def test_the_time_without_a_broker_is_no_part_of_a_start(watch: Watch, state: State) -> None:
    one = instance(state)
    watch.is_quiet(50, one)
    watch.is_quiet(1000, one, broker_away=True)
    watch.is_quiet(51, one)
    assert watch.look(one) == {"d0": "it did not join the cluster within 100 s"}


def test_a_start_without_a_broker_begins_once_there_is_one(watch: Watch) -> None:
    one = instance("starting")
    watch.is_quiet(1000, one, broker_away=True)
    watch.is_quiet(100, one)
    assert watch.look(one)


def test_who_has_joined_may_not_be_silent_without_a_broker_either(watch: Watch) -> None:
    one = instance()
    assert watch.look(one, heard={"d0"}) == {}
    watch.is_quiet(30, one, broker_away=True)
    assert watch.look(one, broker_away=True) == {"d0": "it has said nothing for 30 s"}


@pytest.mark.parametrize("state", ["ready", "draining"])
def test_silence_is_counted_from_the_last_sign_of_life(watch: Watch, state: State) -> None:
    one = instance(state)
    watch.is_quiet(29, one)
    assert watch.look(one, heard={"d0"}) == {}
    watch.is_quiet(30, one)
    assert watch.look(one) == {"d0": "it has said nothing for 30 s"}


def test_the_supervisors_own_absence_is_nobodys_silence(watch: Watch) -> None:
    one = instance()
    assert watch.look(one, heard={"d0"}) == {}
    assert watch.look(one, after_s=3600.0) == {}
    watch.is_quiet(30 - int(LOOK_S), one)
    assert watch.look(one)


def test_a_new_process_begins_anew(watch: Watch) -> None:
    assert watch.look(instance(started_s=1.0), heard={"d0"}) == {}
    watch.is_quiet(29, instance(started_s=1.0))
    watch.is_quiet(29, instance(started_s=2.0))
    ended = instance(started_s=2.0)
    ended.child = None
    assert watch.look(ended, after_s=LOOK_S) == {}
