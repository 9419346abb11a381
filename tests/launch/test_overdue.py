"""Who takes too long to start, or says nothing: by a supervisor's own time."""

from __future__ import annotations

import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from common.awake import AwakeClock
from launch import overdue
from launch.children import Command
from launch.instance import Instance, State
from launch.overdue import LOOK_S, Overdue


class Watch:
    """An `Overdue` of 100 s to start and 30 s of silence, whose clock the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(overdue, "AwakeClock", lambda gap_s: AwakeClock(gap_s, lambda: self.now_s))
        self.overdue = Overdue(100.0, 30.0)

    def look(self, *instances: Instance, heard: set[str] | None = None, after_s: float = 1.0) -> dict[str, str]:
        self.now_s += after_s
        return {one.id: why for one, why in self.overdue.look(instances, heard or set())}


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def instance(state: State = "ready", *, age_s: float = 1000.0, pid: int = 1) -> Instance:
    child = Mock(pid=pid, running=True)
    return Instance("d0", "decode", Command([], {}, Path()), state, child, time.monotonic() - age_s)


@pytest.mark.parametrize("state", ["starting", "switching"])
def test_a_start_that_takes_too_long_is_ended(watch: Watch, state: State) -> None:
    assert watch.look(instance(state, age_s=99.0)) == {}
    assert watch.look(instance(state, age_s=101.0)) == {"d0": "it was not ready within 100 s"}


@pytest.mark.parametrize("state", ["ready", "draining"])
def test_silence_is_counted_from_the_last_sign_of_life(watch: Watch, state: State) -> None:
    one = instance(state)
    for _ in range(29):
        assert watch.look(one) == {}
    assert watch.look(one, heard={"d0"}) == {}
    for _ in range(30):
        assert watch.look(one) == {}
    assert watch.look(one) == {"d0": "it has said nothing for 30 s"}


def test_the_supervisors_own_absence_is_nobodys_silence(watch: Watch) -> None:
    one = instance()
    assert watch.look(one, heard={"d0"}) == {}
    assert watch.look(one, after_s=3600.0) == {}
    for _ in range(30 - int(LOOK_S)):
        assert watch.look(one) == {}
    assert watch.look(one)


def test_a_new_process_begins_anew(watch: Watch) -> None:
    assert watch.look(instance(pid=1), heard={"d0"}) == {}
    for _ in range(29):
        assert watch.look(instance(pid=1)) == {}
    for _ in range(29):
        assert watch.look(instance(pid=2)) == {}
    ended = instance(pid=2)
    ended.child = None
    assert watch.look(ended, after_s=LOOK_S) == {}
