"""The comparison of clocks: what differs is measured and told of once, what is only slow is not taken for it."""

from __future__ import annotations

from typing import Any, cast

import pytest
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, ResponseError
from structlog.testing import capture_logs

from broker.clock import WARN_SKEW_S, ClockWatch
from broker.registry import Registry

NOW_S = 1_700_000_000.0


class ShiftedBroker:
    """A broker that is `behind_s` behind this host, and takes its time to answer; both clocks are its own."""

    def __init__(self, behind_s: float = 0.0) -> None:
        self.behind_s = behind_s
        self.there_s = self.back_s = 0.0
        self.passed_s = 0.0
        self.refusal: ResponseError | None = None
        self.num_asked = 0

    async def now_s(self) -> float:
        self.num_asked += 1
        if self.refusal is not None:
            raise self.refusal
        told_s = self.time() + self.there_s - self.behind_s
        self.passed_s += self.there_s + self.back_s
        return told_s

    def time(self) -> float:
        return NOW_S + self.passed_s

    def monotonic(self) -> float:
        return self.passed_s


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> ShiftedBroker:
    broker = ShiftedBroker()
    monkeypatch.setattr("broker.clock.time", broker)
    return broker


@pytest.fixture
def watch(broker: ShiftedBroker) -> ClockWatch:
    return ClockWatch(cast(Any, broker))


async def test_the_clock_of_a_real_broker_on_this_host_agrees(redis: Redis) -> None:
    watch = ClockWatch(Registry(redis, "c"))
    await watch.look()
    assert abs(watch.skew_s) < 0.1


@pytest.mark.parametrize("behind_s", [30.0, -30.0])
async def test_a_clock_that_is_off_is_measured(broker: ShiftedBroker, watch: ClockWatch, behind_s: float) -> None:
    broker.behind_s = behind_s
    await watch.look()
    assert watch.skew_s == pytest.approx(behind_s)


@pytest.mark.parametrize(("there_s", "back_s"), [(20.0, 0.0), (0.0, 20.0), (10.0, 10.0)])
async def test_a_slow_answer_is_never_taken_for_a_wrong_clock(
    broker: ShiftedBroker, watch: ClockWatch, there_s: float, back_s: float
) -> None:
    broker.there_s, broker.back_s = there_s, back_s
    await watch.look()
    assert watch.skew_s == 0.0
    broker.behind_s = 30.0
    await watch.look()
    assert 10.0 <= watch.skew_s <= 30.0  # what can be said for certain


async def test_a_difference_is_told_when_it_begins_and_when_it_ends(broker: ShiftedBroker, watch: ClockWatch) -> None:
    with capture_logs() as logs:
        for behind_s in (0.0, WARN_SKEW_S + 0.1, 3.0, 4.0, 0.0, 0.0):
            broker.behind_s = behind_s
            await watch.look()
    assert [entry["log_level"] for entry in logs] == ["warning", "info"]
    assert logs[0]["ahead_s"] == pytest.approx(WARN_SKEW_S + 0.1)


async def test_a_broker_that_does_not_tell_its_time_is_asked_no_more_and_says_nothing_of_clocks(
    broker: ShiftedBroker, watch: ClockWatch
) -> None:
    broker.behind_s = 30.0
    await watch.look()
    broker.refusal = NoPermissionError("User limited has no permissions to run the 'time' command")
    with capture_logs() as logs:
        await watch.look()
        await watch.look()
    assert (broker.num_asked, watch.skew_s, len(logs)) == (2, 0.0, 1)


async def test_a_broker_that_is_busy_is_asked_again(broker: ShiftedBroker, watch: ClockWatch) -> None:
    broker.behind_s, broker.refusal = 30.0, ResponseError("BUSY Redis is busy running a script")
    await watch.look()
    assert watch.skew_s == 0.0
    broker.refusal = None
    await watch.look()
    assert watch.skew_s == pytest.approx(30.0)
