"""`python -m tools.bench.transports`: how fast tensors travel between two processes of this host, by each transport.

Throughput is measured over tensors sent one after the other without waiting, latency over single ones: from the call
of `send` to the checked tensor in the receiver's hands; with "+ copy", to the checked copy in memory of its own. Beside
them, in the same run: one memcpy of as many bytes within a process, in cache and over cold memory, and a loop of plain
pyzmq without checksums. All take turns, so that other load hits all alike; a turn begins with tensors that are not
counted, for memory that has been idle for a second has to be touched again.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Annotated, Final

import numpy as np
import numpy.typing as npt
import typer

from broker.cluster.embedded import EmbeddedBroker
from common.messages import TensorHeader
from tools.bench.report import markdown
from tools.bench.transport_ends import (
    COPIED,
    NIXL_CUDA,
    PLAIN_ZMQ,
    Job,
    Source,
    make_source,
    missing_routes,
    serve_sinks,
)

KIB, MIB = 2**10, 2**20
SIZES: Final = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
ROUTES: Final = ("shm", "shm" + COPIED, "zmq", "redis", "nixl", "cuda" + COPIED, NIXL_CUDA + COPIED)
"""Of tensors; the last three where this host has them."""
NUM_BUFFERS: Final = 4
TURN_BYTES: Final = 256 * MIB
"""Sent in one turn at most, so that no queue takes more memory than that."""
MAX_PER_TURN: Final = 2000
LATENCIES_PER_TURN: Final = 20
WARM_UP: Final = 4
"""The first tensors of a turn, not counted."""
SLOWER: Final = {"redis": 8, "nixl": 4, NIXL_CUDA + COPIED: 4}
"""A turn of these is shorter by so much, so that all fit into one run of a few minutes."""
BUSY: Final = frozenset({"nixl", NIXL_CUDA + COPIED})
"""Ways whose libraries poll in threads of their own, on cores that the others need: their turns come after all others,
one route after the other, in processes that are not there before."""

IN_CACHE: Final = "memcpy in cache"
COLD: Final = "memcpy, cold"
KINDS: Final = (IN_CACHE, COLD)
"""One copy within a process: of the same bytes to the same place, and of bytes that no cache holds. A tensor comes from
where a model has just written it and goes where nothing has been lately: that is a cold copy."""


@dataclass
class Samples:
    """All turns of one route at one size."""

    bytes_per_s: list[float] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)


Bytes = npt.NDArray[np.uint8]
Measured = dict[tuple[int, str], Samples]


def bench(
    repetitions: Annotated[int, typer.Option(min=1, help="Turns of every route at every size.")] = 10,
    transports: Annotated[str, typer.Option(help=f"Of {', '.join(ROUTES)}; all that this host has.")] = "",
) -> None:
    """Measure the transports of this host and print two tables in markdown."""
    known = routes_of_this_host()
    routes = [PLAIN_ZMQ, *(transports.split(",") if transports else known)]
    unknown = set(routes) - {PLAIN_ZMQ, *known}
    if unknown:
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: not a transport of this host", param_hint="transports")
    with EmbeddedBroker() as broker:
        measured = asyncio.run(measure_routes([route for route in routes if route not in BUSY], broker, repetitions))
        for route in routes:
            if route in BUSY:
                measured = asyncio.run(measure_routes([route], broker, repetitions)) | measured
    print("\n\n".join(table(measured, routes) for table in (throughput_table, latency_table)))


def routes_of_this_host() -> list[str]:
    """Those of ROUTES whose libraries and devices are here."""
    missing = missing_routes()
    return [route for route in ROUTES if route not in missing]


async def measure_routes(
    routes: Sequence[str], broker: str, repetitions: int, sizes: Sequence[int] | None = None
) -> Measured:
    """Return the samples of every route, and of memcpy, at every size in turns; the first turn is not counted."""
    sizes = SIZES if sizes is None else sizes
    groups = ([route for route in routes if (route == PLAIN_ZMQ) == is_plain] for is_plain in (True, False))
    receiving = [_Receiving(group, broker) for group in groups if group]
    ends = {
        route: (make_source(route, broker, address), process.pipe)
        for process in receiving
        for route, address in process.addresses.items()
    }
    pool = np.random.default_rng(0).integers(0, 256, NUM_BUFFERS * sizes[-1], np.uint8)
    target = np.zeros_like(pool)
    measured: Measured = defaultdict(Samples)
    for repetition in range(-1, repetitions):  # the first one warms up
        print(f"turn {repetition + 1} of {repetitions}", file=sys.stderr, flush=True)
        for size in sizes:
            buffers = [pool[k * size : (k + 1) * size] for k in range(NUM_BUFFERS)]
            for kind in KINDS:
                count = max(2, min(MAX_PER_TURN, TURN_BYTES // size))
                times_s = [_copy_s(target, pool, start, size) for start in _starts(kind, pool.size, size, count)][1:]
                measured[size, kind].latencies_s += times_s
                measured[size, kind].bytes_per_s.append(size / float(np.median(times_s)))
            for route in routes:
                source, pipe = ends[route]
                turn = _Turn(route, source, pipe, [buffer.data for buffer in buffers])
                await turn.warm_up()
                await turn.throughput(measured[size, route])
                await turn.latency(measured[size, route])
        if repetition < 0:
            measured.clear()
    for source, _ in ends.values():
        source.close()
    for process in receiving:
        process.end()
    return measured


def _starts(kind: str, pool_bytes: int, size: int, count: int) -> Iterator[int]:
    """Yield where each copy begins, one more than `count`: cold ones go through all of the pool before any comes
    again."""
    places = [0] if kind == IN_CACHE else range(0, pool_bytes - size + 1, size)
    return itertools.islice(itertools.cycle(places), count + 1)


def _copy_s(target: Bytes, source: Bytes, start: int, size: int) -> float:
    began_s = time.perf_counter()
    np.copyto(target[start : start + size], source[start : start + size])
    return time.perf_counter() - began_s


class _Receiving:
    """A process with the receiving ends of some routes."""

    def __init__(self, routes: Sequence[str], broker: str) -> None:
        self.pipe, far = multiprocessing.Pipe()
        spawn = multiprocessing.get_context("spawn")
        self._process = spawn.Process(target=serve_sinks, args=(os.getpid(), far, routes, broker), daemon=True)
        self._process.start()
        far.close()
        self.addresses: dict[str, str] = self.pipe.recv()

    def end(self) -> None:
        self.pipe.close()
        self._process.join()


@dataclass
class _Turn:
    """One route at one size."""

    route: str
    source: Source
    pipe: Connection
    buffers: Sequence[memoryview]

    async def warm_up(self) -> None:
        await self._send_all(WARM_UP)

    async def throughput(self, samples: Samples) -> None:
        size = self.buffers[0].nbytes
        count = max(2, min(MAX_PER_TURN, TURN_BYTES // size) // SLOWER.get(self.route, 1))
        samples.bytes_per_s.append(count * size / await self._send_all(count) * 1e9)

    async def latency(self, samples: Samples) -> None:
        large = self.buffers[0].nbytes > MIB
        count = max(1, LATENCIES_PER_TURN // (2 * SLOWER.get(self.route, 1)) if large else LATENCIES_PER_TURN)
        self.pipe.send(Job(self.route, count, answer=True))
        began_ns = []
        for number in range(count):
            began_ns.append(time.monotonic_ns())
            await self._send(number)
            await asyncio.to_thread(self.pipe.recv_bytes)
        arrivals_ns: list[int] = self.pipe.recv()
        samples.latencies_s += [(arrived - began) / 1e9 for began, arrived in zip(began_ns, arrivals_ns, strict=True)]

    async def _send_all(self, count: int) -> int:
        """Send one after the other; nanoseconds until the last one has arrived."""
        self.pipe.send(Job(self.route, count, answer=False))
        began_ns = time.monotonic_ns()
        for number in range(count):
            await self._send(number)
        arrivals_ns: list[int] = await asyncio.to_thread(self.pipe.recv)
        return arrivals_ns[-1] - began_ns

    async def _send(self, number: int) -> None:
        data = self.buffers[number % len(self.buffers)]
        await self.source.send(TensorHeader("r", 0, 0, "bench", 1, [data.nbytes], "uint8", data.nbytes), data)


def throughput_table(measured: Measured, routes: Sequence[str]) -> str:
    """Return GB/s, medians over the turns."""
    columns = [*KINDS, *routes]
    rates = {key: float(np.median(samples.bytes_per_s)) / 1e9 for key, samples in measured.items()}
    rows = [[size_in_words(size), *(f"{rates[size, route]:.2f}" for route in columns)] for size in SIZES]
    return markdown(["GB/s", *columns], rows)


def latency_table(measured: Measured, routes: Sequence[str]) -> str:
    """Return microseconds of one tensor, p50 / p99 over all single ones."""
    columns, rows = [*KINDS, *routes], []
    for size in SIZES:
        pairs = (np.percentile(measured[size, route].latencies_s, (50, 99)) * 1e6 for route in columns)
        rows.append([size_in_words(size), *(f"{p50:.0f} / {p99:.0f}" for p50, p99 in pairs)])
    return markdown(["p50 / p99, µs", *columns], rows)


def size_in_words(size: int) -> str:
    """Return `64 KiB` and the like."""
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


if __name__ == "__main__":
    typer.run(bench)
