"""The benchmark of the transports: it measures real processes, and its tables say what was measured."""

from __future__ import annotations

import numpy as np
import pytest
import typer

from launch.bench import transports
from launch.bench.memcpy import COLD, IN_CACHE, Memcpy
from launch.bench.transport_ends import PLAIN_ZMQ
from launch.bench.transports import KIB, Samples, bench, latency_table, ratio_table, throughput_table, ways_of_this_host


@pytest.mark.cluster
def test_every_way_is_measured_between_two_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transports, "SIZES", (64 * KIB, 256 * KIB))
    monkeypatch.setattr(transports, "MAX_PER_TURN", 3)
    monkeypatch.setattr(transports, "LATENCIES_PER_TURN", 2)
    ways = ways_of_this_host()
    assert ways[:4] == ["shm", "shm + copy", "zmq", "redis"]
    bench(repetitions=1)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("| 64 KiB", "| 256 KiB"))]
    columns = [4 + len(ways), 6, 4 + len(ways)]  # three tables: sizes, memcpy twice, plain pyzmq and the ways; ratios
    assert [row.count("|") - 1 for row in rows] == [number for number in columns for _ in range(2)]
    assert not any("nan" in row or "–" in row for row in rows)


def test_ratios_are_those_of_the_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "SIZES", (64 * KIB,))
    rates = {COLD: [8e9, 1e9, 6e9], PLAIN_ZMQ: [2e9], "shm": [4e9], "shm + copy": [3e9], "zmq": [1e9, 1.6e9, 9e9]}
    rates[IN_CACHE] = [12e9]
    measured = {(64 * KIB, way): Samples(values, [1e-6, 3e-6]) for way, values in rates.items()}
    ways = [PLAIN_ZMQ, "shm", "shm + copy", "zmq"]
    row = throughput_table(measured, ways).splitlines()[2]
    assert row == "| 64 KiB | 12.00 | 6.00 | 2.00 | 4.00 | 3.00 | 1.60 |"
    assert ratio_table(measured, ways).splitlines()[2] == "| 64 KiB | 3.00 | 1.50 | 4.00 | 2.00 | 1.25 |"
    assert latency_table(measured, ways).splitlines()[2].startswith("| 64 KiB | 2 / 3 |")
    assert ratio_table(measured, ["shm"]).splitlines()[2] == "| 64 KiB | 3.00 | 1.50 |"


def test_a_cold_copy_goes_through_all_of_the_memory_before_it_comes_back() -> None:
    memcpy = Memcpy(np.zeros(100, np.uint8))
    starts = [*memcpy._starts(30, 2), *memcpy._starts(30, 3)]
    assert starts == [0, 30, 60, 0, 30]
    assert [len(memcpy.times_s(kind, 30, 5)) for kind in (IN_CACHE, COLD)] == [5, 5]


def test_what_is_no_transport_of_this_host_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match="pigeon"):
        bench(repetitions=1, transports="shm,pigeon")
