"""How cores are counted and shared."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launch.cpus import available_cores, split_threads
from launch.topology import Topology


@pytest.mark.parametrize(
    ("topology", "cores", "expected"),
    [
        (Topology(1, 1), 2, {"prefill_decode": 1, "encoder": 1}),
        (Topology(1, 1), 12, {"prefill_decode": 8, "encoder": 4}),
        (Topology(0, 1), 4, {"prefill_decode": 4, "encoder": 2}),
        (Topology(4, 2), 1, {"prefill_decode": 1, "encoder": 1}),
    ],
)
def test_decoders_get_two_shares_and_nobody_none(topology: Topology, cores: int, expected: dict[str, int]) -> None:
    assert split_threads(topology, cores) == expected


def test_threads_never_exceed_the_cores_where_there_are_enough() -> None:
    for encoders in range(4):
        for decoders in range(1, 4):
            topology = Topology(encoders, decoders)
            threads = split_threads(topology, 16)
            assert encoders * threads["encoder"] + decoders * threads["prefill_decode"] <= 16


def test_a_container_quota_counts(tmp_path: Path) -> None:
    everything = available_cores(tmp_path / "missing")
    assert everything == len(os.sched_getaffinity(0))
    quota = tmp_path / "cpu.max"
    quota.write_text("50000 100000\n")
    assert available_cores(quota) == 1
    quota.write_text("max 100000\n")
    assert available_cores(quota) == everything
