"""How a worker leaves on purpose where the broker does not help, or requests do not end."""

from __future__ import annotations

import asyncio

import pytest

from services.process import drain
from services.process.drain import DrainState

LONG_S = 600.0
pytestmark = pytest.mark.usefixtures("short_notice")


@pytest.fixture
def short_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "NOTICE_S", 0.05)


async def _left(leaving: DrainState, within_s: float) -> bool:
    try:
        async with asyncio.timeout(within_s):
            await leaving.complete()
    except TimeoutError:
        return False
    return True


async def test_a_broker_that_is_away_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    leaving = DrainState(lambda: 0, LONG_S)
    leaving.request()
    assert not await _left(leaving, 0.3), "it says nothing to the broker, and waits for it"
    monkeypatch.setattr(drain, "ANNOUNCE_S", 0.1)
    assert await _left(leaving, 10.0)


async def test_what_is_under_way_is_finished_without_a_broker_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "ANNOUNCE_S", 0.0)
    num_open = 1
    leaving = DrainState(lambda: num_open, LONG_S)
    leaving.request()
    assert not await _left(leaving, 0.3)
    num_open = 0
    assert await _left(leaving, 10.0)


async def test_requests_that_come_all_the_same_do_not_keep_it_longer_than_one_may_live() -> None:
    leaving = DrainState(lambda: 1, 0.3)
    leaving.request()
    leaving.announced = True
    assert await _left(leaving, 10.0)


async def test_nobody_leaves_who_was_not_asked_to() -> None:
    assert not await _left(DrainState(lambda: 0, 0.0), 0.2)
