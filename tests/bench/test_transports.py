"""The benchmark of the transports: it measures real processes, and its tables say what was measured."""

from __future__ import annotations

import pytest
import typer

from launch.bench import transports
from launch.bench.transport_ends import PLAIN_ZMQ
from launch.bench.transports import KIB, MEMCPY, Samples, bench, latency_table, throughput_table


@pytest.mark.cluster
def test_every_way_is_measured_between_two_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transports, "SIZES", (64 * KIB, 256 * KIB))
    monkeypatch.setattr(transports, "MAX_PER_TURN", 3)
    monkeypatch.setattr(transports, "LATENCIES_PER_TURN", 2)
    bench(repetitions=1, transports="shm,shm + copy,zmq,redis")
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("| 64 KiB", "| 256 KiB"))]
    assert [row.count("|") for row in rows] == [11, 11, 8, 8]  # two tables, a column per way
    assert not any("nan" in row or "–" in row for row in rows)


def test_ratios_are_those_of_the_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "SIZES", (64 * KIB,))
    rates = {MEMCPY: [8e9, 1e9, 6e9], PLAIN_ZMQ: [2e9], "shm": [4e9], "shm + copy": [3e9], "zmq": [1e9, 1.6e9, 9e9]}
    measured = {(64 * KIB, way): Samples(values, [1e-6, 3e-6]) for way, values in rates.items()}
    ways = [PLAIN_ZMQ, "shm", "shm + copy", "zmq"]
    row = throughput_table(measured, ways).splitlines()[2]
    assert row == "| 64 KiB | 6.00 | 2.00 | 4.00 | 3.00 | 1.60 | 1.50 | 2.00 | 1.25 |"
    assert latency_table(measured, ways).splitlines()[2].startswith("| 64 KiB | 2 / 3 |")
    assert throughput_table(measured, ["shm"]).splitlines()[2] == "| 64 KiB | 6.00 | 4.00 | 1.50 | – | – |"


def test_what_is_no_transport_of_this_host_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match="pigeon"):
        bench(repetitions=1, transports="shm,pigeon")
