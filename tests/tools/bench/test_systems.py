"""The systems under test over HTTP: a cluster with every hop of its handoffs, and a server by its address."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.cluster.local_cluster import LocalCluster
from services.process.handoff_trace import HOPS
from tools.bench import __main__ as bench
from tools.bench.interference import interference


@pytest.mark.cluster
def test_a_cluster_and_servers_are_measured_and_every_hop_between_two_workers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plot = tmp_path / "gaps.svg"
    addresses: list[str] = []
    stop = LocalCluster.stop

    def compare_before_stop(cluster: LocalCluster) -> None:
        addresses.append(cluster.base_url)
        servers = [f"one={cluster.base_url}", f"two={cluster.base_url}/=signpost"]
        bench.bench(["signpost"], in_flight="2", repetitions=1, requests=4, server=servers)
        loaded = [f"loaded={cluster.base_url}=signpost"]
        interference(server=loaded, streams=1, images=1, size=56, seconds=0.5, repetitions=1, plot=plot)
        stop(cluster)

    monkeypatch.setattr(LocalCluster, "stop", compare_before_stop)
    monkeypatch.setattr(bench, "WARM_UP_HANDOFFS", 1)
    bench.bench(["signpost"], in_flight="1", repetitions=1, requests=1, handoffs=2)
    rows = capsys.readouterr().out.splitlines()
    hops = [row for row in rows if "→" in row]
    assert len(hops) == len(HOPS)
    assert "nan" not in "".join(hops)
    assert [row.split(" | ")[1] for row in rows if row.startswith("| 2 ")] == ["one", "two"]
    assert all(row.endswith("4 of 4 |") for row in rows if row.startswith("| 2 "))
    phases = [row.strip("| ").split(" | ") for row in rows if row.startswith("| loaded")]
    assert [phase[1] for phase in phases] == ["alone", "beside images"]
    assert [float(phase[-1]) > 0 for phase in phases] == [False, True]
    assert all(float(phase[4]) > 0 for phase in phases)
    assert "loaded, beside images" in plot.read_text()
    assert len(addresses) == 1
