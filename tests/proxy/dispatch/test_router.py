"""Who gets what: the router's choices as pure functions."""

from __future__ import annotations

from collections import Counter
from unittest.mock import Mock

from common.messages import InstanceRecord, Role
from proxy.dispatch.router import imbalance, pick_decoder, pick_encoder, prefer_pair
from proxy.dispatch.worker import Load, Worker


def _worker(
    name: str,
    requests: int = 0,
    tokens: int = 0,
    items: int = 0,
    outstanding: int = 0,
    outstanding_tokens: int = 0,
    role: Role = "encoder",
) -> Worker:
    record = InstanceRecord(
        instance_id=name,
        role=role,
        epoch=1,
        model="m",
        fingerprint="f",
        dtype="float32",
        http_address="",
        requests_address="",
        outstanding=outstanding,
        outstanding_tokens=outstanding_tokens,
    )
    return Worker(record, Mock(), Load(requests, tokens, items))


def test_the_least_loaded_decoder_is_picked_by_tokens_then_requests():
    short, long = _worker("b", 2, 10), _worker("a", 1, 500)
    assert pick_decoder([long, short]) == (short, "unknown")
    one, two = _worker("b", 1, 10), _worker("a", 2, 10)
    assert pick_decoder([two, one]) == (one, "unknown")


def test_other_proxies_work_counts_too():
    busy_elsewhere, ours = _worker("a", outstanding_tokens=50), _worker("b", 2, 10)
    assert pick_decoder([busy_elsewhere, ours])[0] is ours
    busy_elsewhere, ours = _worker("a", outstanding=5), _worker("b", 2)
    assert pick_decoder([busy_elsewhere, ours])[0] is ours


def test_a_cached_prompt_goes_where_it_is_cached():
    idle, home = _worker("a"), _worker("b", 3, 300)
    assert pick_decoder([idle, home], cached_at="b") == (home, "hit")
    assert pick_decoder([idle, home], cached_at="gone") == (idle, "unknown")


def test_a_cached_prompt_goes_elsewhere_when_its_instance_has_over_its_share():
    idle, home = _worker("a", 4, 100), _worker("b", 4, 170)
    assert pick_decoder([idle, home], cached_at="b") == (idle, "overloaded")
    home = _worker("b", 4, 160)
    assert pick_decoder([idle, home], cached_at="b") == (home, "hit")


def test_a_pair_takes_what_its_busier_half_has_less_of_than_a_whole_instance():
    whole, idle, busy = _worker("pd", tokens=100), _worker("p", tokens=10), _worker("d", tokens=120)
    assert prefer_pair(whole, idle, _worker("d", tokens=90))
    assert not prefer_pair(whole, idle, busy)
    assert not prefer_pair(whole, busy, idle)


def test_imbalance_is_the_busiest_over_the_mean():
    assert imbalance([]) == imbalance([_worker("a"), _worker("b")]) == 1.0
    decoders = [_worker("a", tokens=30, items=1, role="decode"), _worker("b", tokens=10, role="decode")]
    assert imbalance(decoders) == 1.5


def test_imbalance_of_encoders_is_that_of_their_items():
    assert imbalance([_worker("a", items=6), _worker("b", items=2)]) == 1.5
    assert imbalance([_worker("a", items=2), _worker("b", outstanding=4), _worker("c")]) == 2.0


def test_content_stays_with_its_encoder_when_others_come_and_go():
    workers = [_worker(f"e{index}") for index in range(4)]
    keys = [f"hash{index}" for index in range(200)]
    homes = {key: pick_encoder(key, workers)[0] for key in keys}
    counts = Counter(worker.instance_id for worker in homes.values())
    assert min(counts.values()) > 25  # spread over all
    without_last = {key: pick_encoder(key, workers[:3])[0] for key in keys}
    assert all(without_last[key] is homes[key] for key in keys if homes[key] is not workers[3])


def test_an_encoder_over_its_share_is_passed_over():
    home, affinity = pick_encoder("x", [_worker("e0"), _worker("e1")])
    assert affinity == "hit"
    workers = [_worker(name, items=20 if name == home.instance_id else 0) for name in ("e0", "e1")]
    elsewhere, affinity = pick_encoder("x", workers)
    assert affinity == "overloaded"
    assert elsewhere.instance_id != home.instance_id


def test_what_an_encoder_has_from_other_proxies_counts_too():
    home, _ = pick_encoder("x", [_worker("e0"), _worker("e1")])
    for outstanding, picks_home in ((3, True), (20, False)):
        workers = [
            _worker(name, items=1, outstanding=outstanding if name == home.instance_id else 0) for name in ("e0", "e1")
        ]
        picked, affinity = pick_encoder("x", workers)
        assert (picked.instance_id == home.instance_id) is picks_home
        assert affinity == ("hit" if picks_home else "overloaded")


def test_avoided_encoders_are_used_only_where_there_is_no_other():
    one, two = _worker("e0"), _worker("e1")
    home, _ = pick_encoder("x", [one, two])
    other = two if home is one else one
    assert pick_encoder("x", [one, two], avoid={home.instance_id}) == (other, "avoided")
    assert pick_encoder("x", [one, two], avoid={other.instance_id}) == (home, "hit")
    assert pick_encoder("x", [one], avoid={"e0"}) == (one, "hit")
