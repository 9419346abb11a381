"""Who gets what: the router's choices as pure functions."""

from __future__ import annotations

from collections import Counter
from unittest.mock import Mock

from common.messages import InstanceRecord
from proxy.router import pick_decoder, pick_encoder
from proxy.worker import Load, Worker


def _worker(name: str, requests: int = 0, size: int = 0, outstanding: int = 0) -> Worker:
    record = InstanceRecord(
        instance_id=name,
        role="encoder",
        epoch=1,
        model="m",
        fingerprint="f",
        dtype="float32",
        http_address="",
        requests_address="",
        outstanding=outstanding,
    )
    return Worker(record, Mock(), Load(requests, size))


def test_the_least_loaded_decoder_is_picked_by_requests_then_tokens():
    assert pick_decoder([]) is None
    idle, busy = _worker("b", 1, 10), _worker("a", 2, 1)
    assert pick_decoder([busy, idle]) is idle
    short, long = _worker("b", 1, 10), _worker("a", 1, 500)
    assert pick_decoder([long, short]) is short


def test_other_proxies_requests_count_too():
    busy_elsewhere, ours = _worker("a", 0, 0, outstanding=5), _worker("b", 2, 10)
    assert pick_decoder([busy_elsewhere, ours]) is ours


def test_content_stays_with_its_encoder_when_others_come_and_go():
    workers = [_worker(f"e{index}") for index in range(4)]
    keys = [f"hash{index}" for index in range(200)]
    homes = {key: pick_encoder(key, workers) for key in keys}
    counts = Counter(worker.instance_id for worker in homes.values())
    assert min(counts.values()) > 25  # spread over all
    without_last = {key: pick_encoder(key, workers[:3]) for key in keys}
    assert all(without_last[key] is homes[key] for key in keys if homes[key] is not workers[3])


def test_an_encoder_over_its_share_is_passed_over():
    home = pick_encoder("x", [_worker("e0"), _worker("e1")])
    assert home is not None
    workers = [
        _worker("e0", 20 if home.instance_id == "e0" else 0),
        _worker("e1", 20 if home.instance_id == "e1" else 0),
    ]
    elsewhere = pick_encoder("x", workers)
    assert elsewhere is not None
    assert elsewhere.instance_id != home.instance_id


def test_avoided_encoders_are_used_only_where_there_is_no_other():
    one, two = _worker("e0"), _worker("e1")
    assert pick_encoder("x", [one, two], avoid={"e0"}) is two
    assert pick_encoder("x", [one], avoid={"e0"}) is one
    assert pick_encoder("x", []) is None
