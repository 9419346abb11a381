"""How cores are counted and shared."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from common.messages import Role
from launch.cluster.shares import available_cores, split_threads
from launch.cluster.topology import Topology, parse_topology


@pytest.mark.parametrize(
    ("text", "cores", "expected"),
    [
        ("1e1pd", 2, {"prefill_decode": 1, "encoder": 1}),
        ("1e1pd", 12, {"prefill_decode": 8, "encoder": 4}),
        ("1pd", 4, {"prefill_decode": 4}),
        ("4e2pd", 1, {"prefill_decode": 1, "encoder": 1}),
        ("1e1p1d", 10, {"prefill": 4, "decode": 4, "encoder": 2}),
        ("1epd", 8, {"encode_prefill_decode": 8}),
        ("1epd1e", 8, {"encode_prefill_decode": 6, "encoder": 2}),
    ],
)
def test_decoders_get_two_shares_and_nobody_none(text: str, cores: int, expected: dict[Role, int]) -> None:
    threads = split_threads(parse_topology(text), cores)
    assert {role: threads[role] for role in expected} == expected


def test_threads_never_exceed_the_cores_where_there_are_enough() -> None:
    for counts in itertools.product(range(3), repeat=5):
        if any(counts):
            threads = split_threads(topology := Topology(*counts), 32)
            assert sum(topology.count(role) * share for role, share in threads.items()) <= 32


def test_a_container_quota_counts(tmp_path: Path) -> None:
    everything = available_cores(tmp_path / "missing")
    assert everything == len(os.sched_getaffinity(0))
    quota = tmp_path / "cpu.max"
    quota.write_text("50000 100000\n")
    assert available_cores(quota) == 1
    quota.write_text("max 100000\n")
    assert available_cores(quota) == everything
