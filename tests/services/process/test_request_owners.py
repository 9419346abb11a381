"""Proxies that fall silent leave orphans, and learn of it if they come back."""

from __future__ import annotations

from services.process.request_owners import RequestOwners


def test_only_a_silent_proxy_loses_its_requests() -> None:
    watch = RequestOwners(silence_s=0.0)
    watch.heard(b"p0")
    watch.add(b"p0", "a", attempt=3)
    watch.add(b"p0", "b")
    watch.remove("b")
    assert sorted(watch.pop_orphans()) == ["a"]
    assert watch.get("a") is None
    assert len(watch) == 0
    assert watch.pop_orphans() == []
    assert watch.heard(b"p0") == {"a": 3}
    assert watch.heard(b"p0") == {}


def test_a_proxy_that_beats_keeps_its_requests() -> None:
    watch = RequestOwners(silence_s=60.0)
    watch.heard(b"p0")
    watch.heard(b"p1")
    watch.add(b"p0", "a")
    watch.add(b"p1", "b")
    watch.mark_gone(b"p1")
    assert watch.pop_orphans() == ["b"]
    request = watch.get("a")
    assert request is not None
    assert request.proxy == b"p0"


def test_work_of_a_lost_proxy_ends_like_all_other_work() -> None:
    watch = RequestOwners(silence_s=0.0)
    watch.heard(b"p0")
    watch.add(b"p0", "a", num_tokens=30)
    watch.add(b"p0", "b", num_tokens=12)
    watch.remove("b")
    watch.pop_orphans()
    assert (watch.work, watch.ended_work) == (0, 42)


def test_each_item_of_a_request_is_work_once_however_many_attempts_it_takes() -> None:
    watch = RequestOwners()
    for _ in range(8):
        watch.add(b"p0", "images", num_new_items=1)
    watch.add(b"p0", "image", num_new_items=1)
    for number in (2, 3):
        watch.add(b"p0", "image", attempt=number)
    assert (len(watch), watch.work, watch.num_tokens) == (2, 9, 0)
    watch.remove("images")
    assert (watch.work, watch.ended_work) == (1, 8)


def test_a_proxy_that_missed_a_message_learns_that_its_requests_are_lost_even_those_that_ended_with_it() -> None:
    watch = RequestOwners(silence_s=60.0)
    watch.heard(b"p0")
    for request_id in ("running", "ended"):
        watch.add(b"p0", request_id, attempt=1)
    watch.mark_gone(b"p0")
    watch.remove("ended")
    assert not watch.knows("ended", 1)
    assert watch.heard(b"p0") == {}
    assert watch.pop_orphans() == ["running"]
    assert watch.heard(b"p0") == {"running": 1, "ended": 1}
