"""Seconds of outstanding work, from what ended lately."""

from __future__ import annotations

import pytest

from services.process.work import FADE, WorkMeter


def test_nothing_is_known_before_the_first_end() -> None:
    meter = WorkMeter()
    meter.look(5.0, 0)
    assert meter.seconds_of(100) == 0.0


def test_open_work_takes_as_long_as_ended_work_did() -> None:
    meter = WorkMeter()
    meter.look(2.0, 100)
    assert meter.seconds_of(300) == pytest.approx(6.0)


def test_idle_time_changes_nothing_and_the_past_fades() -> None:
    meter = WorkMeter()
    meter.look(2.0, 100)
    for _ in range(1000):
        meter.look(2.0, 100)
    assert meter.seconds_of(100) == pytest.approx(2.0)
    meter.look(3.0, 200)
    assert meter.seconds_of(100) == pytest.approx(100 * (2 * FADE + 1) / (100 * FADE + 100))
    for second in range(1000):
        meter.look(4.0 + second, 300 + 100 * second)
    assert meter.seconds_of(100) == pytest.approx(1.0, abs=1e-3)


def test_an_idle_engine_that_tells_its_numbers_does_no_work() -> None:
    meter = WorkMeter()
    for second in range(3600):
        meter.look(1e-4 * second, 0, idle=True)
    meter.look(2.36, 100)
    assert meter.seconds_of(100) == pytest.approx(2.0, abs=1e-3)
    for second in range(3600):
        meter.look(2.36 + 1e-4 * second, 100, idle=True)
    assert meter.seconds_of(100) == pytest.approx(2.0, abs=1e-3)
