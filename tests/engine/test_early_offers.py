"""Offers before their request: kept as long as their sender repeats them, the newest attempt of each input."""

import time

import pytest

from engine.events import InputCancelled
from engine.scheduler.early_offers import EarlyOffers

LEASE_S = 10.0
FAR_S = 1e12


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock to set."""
    clock = [1000.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    return clock


def test_an_offer_that_is_not_repeated_is_given_up_long_before_its_deadline(now: list[float]) -> None:
    early = EarlyOffers[str](LEASE_S)
    assert early.keep("a", 0, 3, "what", FAR_S) == []
    assert early.next_deadline_s() == now[0] + LEASE_S
    assert early.expire(now[0] + LEASE_S - 1) == []
    assert early.expire(now[0] + LEASE_S) == [InputCancelled("a", 0, 3)]
    assert len(early) == 0


def test_an_offer_that_is_repeated_stays_and_keeps_its_own_deadline(now: list[float]) -> None:
    early = EarlyOffers[str](LEASE_S)
    for _ in range(5):
        early.keep("a", 0, 0, "what", FAR_S)
        now[0] += LEASE_S - 1
        assert early.expire(now[0]) == []
    assert early.take("a", 0) == (0, "what", FAR_S)


def test_no_offer_is_kept_beyond_its_own_deadline(now: list[float]) -> None:
    early = EarlyOffers[str](LEASE_S)
    early.keep("a", 0, 0, "what", now[0] + 1)
    assert early.expire(now[0] + 1) == [InputCancelled("a", 0, 0)]
