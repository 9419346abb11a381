"""Offers before their request: kept as long as their sender repeats them, the newest attempt of each input."""

import time

import pytest

from common.messages import Grant
from engine.handoff import early_offers
from engine.handoff.early_offers import EarlyOffers

LEASE_S = 10.0
FAR_S = 1e12


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock to set."""
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    return clock


def test_an_offer_that_is_not_repeated_is_given_up_long_before_its_deadline(now: list[float]) -> None:
    early = EarlyOffers[str](LEASE_S)
    assert early.keep("a", 0, 3, "what", FAR_S) == []
    assert early.next_deadline_s() == now[0] + LEASE_S
    assert early.expire(now[0] + LEASE_S - 1) == []
    assert early.expire(now[0] + LEASE_S) == [Grant("a", 0, 3, "cancelled")]
    assert len(early) == 0
    assert early.num_expired == 1


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
    assert early.expire(now[0] + 1) == [Grant("a", 0, 0, "cancelled")]


def test_an_offer_waits_for_the_attempt_of_the_request_that_it_is_for() -> None:
    early = EarlyOffers[str](LEASE_S)
    assert early.keep("a", 0, 7, "what", FAR_S, request_attempt=2) == []
    assert early.take("a", 0, request_attempt=1) is None
    assert early.forget("a", 1) == [], "the attempt before it has ended"
    assert early.keep("a", 0, 5, "what", FAR_S, request_attempt=1) == [Grant("a", 0, 5, "cancelled")]
    assert early.take("a", 0, request_attempt=2) == (7, "what", FAR_S)


def test_a_request_that_has_ended_before_it_came_wants_no_offers_in_any_attempt() -> None:
    early = EarlyOffers[str](LEASE_S)
    early.keep("a", 0, 0, "what", FAR_S, request_attempt=3)
    assert early.forget("a", None) == [Grant("a", 0, 0, "cancelled")]
    assert early.keep("a", 0, 1, "what", FAR_S, request_attempt=4) == [Grant("a", 0, 1, "cancelled")]


def test_only_what_is_withdrawn_is_given_up_and_nobody_is_told() -> None:
    early = EarlyOffers[str](LEASE_S)
    early.keep("a", 0, 1, "what", FAR_S)
    for key in (("a", 0, 0), ("a", 0, 2), ("a", 1, 1), ("b", 0, 1)):
        early.withdraw(*key)
    assert len(early) == 1
    early.withdraw("a", 0, 1)
    early.withdraw("a", 0, 1)
    assert len(early) == 0
    assert early.num_expired == 0


def test_with_too_many_the_oldest_is_given_up_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_offers, "MAX_EARLY_OFFERS", 2)
    early = EarlyOffers[str](LEASE_S)
    for name in "abc":
        cancelled = early.keep(name, 0, 0, "what", FAR_S)
    assert cancelled == [Grant("a", 0, 0, "cancelled")]
    assert (len(early), early.num_evicted) == (2, 1)
