"""The benchmark of the transports: it measures real processes, and its tables say what was measured."""

from __future__ import annotations

import asyncio
import ctypes

import pytest
import typer

from broker.transports.cuda.runtime import CudaError
from common.messages import TensorHeader
from tests.broker.transports.fake_cuda import FakeCuda
from tests.broker.transports.transport_kit import NEEDS_NIXL
from tools.bench import transport_ends, transports
from tools.bench.transport_ends import PLAIN_ZMQ, CudaSource, make_sink, make_source
from tools.bench.transports import (
    COLD,
    IN_CACHE,
    KIB,
    Samples,
    bench,
    latency_table,
    routes_of_this_host,
    throughput_table,
)


@pytest.mark.cluster
def test_every_way_is_measured_between_two_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transports, "SIZES", (64 * KIB, 256 * KIB))
    monkeypatch.setattr(transports, "MAX_PER_TURN", 3)
    monkeypatch.setattr(transports, "LATENCIES_PER_TURN", 2)
    routes = routes_of_this_host()
    assert routes[:4] == ["shm", "shm + copy", "zmq", "redis"]
    bench(repetitions=1)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("| 64 KiB", "| 256 KiB"))]
    columns = [4 + len(routes), 4 + len(routes)]  # two tables; memcpy comes twice
    assert [row.count("|") - 1 for row in rows] == [number for number in columns for _ in range(2)]
    assert not any("nan" in row or "–" in row for row in rows)


@pytest.mark.parametrize("route", ["cuda + copy", pytest.param("nixl+cuda + copy", marks=NEEDS_NIXL)])
async def test_what_lies_on_a_gpu_is_measured_by_each_way_between_gpus(
    monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    """Both ends in this process, over memory that stands for a GPU's; `shm` and the like are not taken instead."""
    gpus: list[FakeCuda] = []

    def open_cuda() -> FakeCuda:
        gpus.append(FakeCuda())
        return gpus[-1]

    monkeypatch.setattr(transport_ends, "CudaRuntime", open_cuda)
    sink = make_sink(route, broker="")
    source = make_source(route, "", sink.address)
    assert isinstance(source, CudaSource)
    assert isinstance(sink, transport_ends.CudaSink)
    buffers = [memoryview(bytes([number]) * size) for number, size in ((1, 64 * KIB), (2, 256 * KIB), (3, 64 * KIB))]
    for data in buffers:  # which stay, as those of the benchmark do: each is brought to the device once
        size = data.nbytes
        header = TensorHeader("r", 0, 0, "bench", 1, [size], "uint8", size)
        async with asyncio.timeout(60):
            taken, _ = await asyncio.gather(sink.receive(), source.send(header, data))
        assert taken.size_bytes == size
        assert ctypes.string_at(sink._target, size) == bytes(data)
    assert source._sender.num_sent == {sink.address.partition("://")[0]: 3}
    source.close()
    sink._receiver.close()


@pytest.mark.parametrize(("cuda", "nixl"), [(True, True), (True, False), (False, True), (False, False)])
def test_ways_between_gpus_are_measured_where_there_is_what_they_need(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, nixl: bool
) -> None:
    def open_cuda() -> FakeCuda:
        if not cuda:
            raise CudaError("no library")
        return FakeCuda()

    monkeypatch.setattr(transport_ends, "CudaRuntime", open_cuda)
    monkeypatch.setattr(transport_ends, "module_name", lambda: "nixl_cu13" if nixl else None)
    routes = routes_of_this_host()
    assert ("nixl" in routes, "cuda + copy" in routes, "nixl+cuda + copy" in routes) == (nixl, cuda, cuda and nixl)


def test_rates_are_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "SIZES", (64 * KIB,))
    rates = {COLD: [8e9, 1e9, 6e9], PLAIN_ZMQ: [2e9], "shm": [4e9], "shm + copy": [3e9], "zmq": [1e9, 1.6e9, 9e9]}
    rates |= {IN_CACHE: [12e9]}
    measured = {(64 * KIB, route): Samples(values, [1e-6, 3e-6]) for route, values in rates.items()}
    routes = [PLAIN_ZMQ, "shm", "shm + copy", "zmq"]
    row = throughput_table(measured, routes).splitlines()[2]
    assert row == "| 64 KiB | 12.00 | 6.00 | 2.00 | 4.00 | 3.00 | 1.60 |"
    assert latency_table(measured, routes).splitlines()[2].startswith("| 64 KiB | 2 / 3 |")


def test_a_cold_copy_goes_through_all_of_the_memory_before_it_comes_back() -> None:
    assert list(transports._starts(COLD, 100, 30, 4)) == [0, 30, 60, 0, 30]
    assert list(transports._starts(IN_CACHE, 100, 30, 2)) == [0, 0, 0]


def test_what_is_no_transport_of_this_host_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match="pigeon"):
        bench(repetitions=1, transports="shm,pigeon")
