"""Offers before their request: kept as long as their sender repeats them, the newest attempt of each input."""

import time

import pytest

from common.messages import Grant, InputLayout, Offer
from engine.handoff import early_offers
from engine.handoff.early_offers import EarlyOffers

LEASE_S = 10.0
FAR_S = 1e12


def offer(name: str, input_id: int, attempt: int, deadline_s: float = FAR_S, request_attempt: int = 0) -> Offer:
    sizes = [1, 4], "float32", 16, InputLayout(1, [])
    return Offer(name, input_id, attempt, "h", "image", *sizes, "e0", deadline_s, request_attempt)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock to set."""
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    return clock


def test_an_offer_that_is_not_repeated_is_given_up_long_before_its_deadline(now: list[float]) -> None:
    early = EarlyOffers[Offer](LEASE_S)
    assert early.keep(offer("a", 0, 3)) == []
    assert early.deadlines_s() == [now[0] + LEASE_S]
    assert early.expire(now[0] + LEASE_S - 1) == []
    assert early.expire(now[0] + LEASE_S) == [Grant("a", 0, 3, "cancelled")]
    assert len(early) == 0
    assert early.num_expired == 1


def test_an_offer_that_is_repeated_stays_and_keeps_its_own_deadline(now: list[float]) -> None:
    early = EarlyOffers[Offer](LEASE_S)
    for _ in range(5):
        early.keep(offer("a", 0, 0))
        now[0] += LEASE_S - 1
        assert early.expire(now[0]) == []
    assert early.pop("a", 0) == offer("a", 0, 0)


def test_no_offer_is_kept_beyond_its_own_deadline(now: list[float]) -> None:
    early = EarlyOffers[Offer](LEASE_S)
    early.keep(offer("a", 0, 0, deadline_s=now[0] + 1))
    assert early.expire(now[0] + 1) == [Grant("a", 0, 0, "cancelled")]


def test_an_offer_waits_for_the_attempt_of_the_request_that_it_is_for() -> None:
    early = EarlyOffers[Offer](LEASE_S)
    assert early.keep(offer("a", 0, 7, request_attempt=2)) == []
    assert early.pop("a", 0, request_attempt=1) is None
    assert early.forget("a", 1) == [], "the attempt before it has ended"
    assert early.keep(offer("a", 0, 5, request_attempt=1)) == [Grant("a", 0, 5, "cancelled")]
    assert early.pop("a", 0, request_attempt=2) == offer("a", 0, 7, request_attempt=2)


def test_a_request_that_has_ended_before_it_came_wants_no_offers_in_any_attempt() -> None:
    early = EarlyOffers[Offer](LEASE_S)
    early.keep(offer("a", 0, 0, request_attempt=3))
    assert early.forget("a", None) == [Grant("a", 0, 0, "cancelled")]
    assert early.keep(offer("a", 0, 1, request_attempt=4)) == [Grant("a", 0, 1, "cancelled")]


def test_an_abort_after_the_end_of_an_attempt_is_about_no_later_attempt() -> None:
    early = EarlyOffers[Offer](LEASE_S)
    early.forget("a", 1)
    assert early.keep(offer("a", 0, 4, request_attempt=2)) == []
    assert early.forget("a", None) == []
    assert early.keep(offer("a", 0, 4, request_attempt=2)) == []
    assert early.keep(offer("a", 0, 3, request_attempt=1)) == [Grant("a", 0, 3, "cancelled")]
    assert early.pop("a", 0, request_attempt=2) == offer("a", 0, 4, request_attempt=2)


def test_only_what_is_withdrawn_is_given_up_and_nobody_is_told() -> None:
    early = EarlyOffers[Offer](LEASE_S)
    early.keep(offer("a", 0, 1))
    for key in (("a", 0, 0), ("a", 0, 2), ("a", 1, 1), ("b", 0, 1)):
        early.withdraw(*key)
    assert len(early) == 1
    early.withdraw("a", 0, 1)
    early.withdraw("a", 0, 1)
    assert len(early) == 0
    assert early.num_expired == 0


def test_with_too_many_the_oldest_is_given_up_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_offers, "MAX_EARLY_OFFERS", 2)
    early = EarlyOffers[Offer](LEASE_S)
    for name in "abc":
        cancelled = early.keep(offer(name, 0, 0))
    assert cancelled == [Grant("a", 0, 0, "cancelled")]
    assert (len(early), early.num_evicted) == (2, 1)
