"""`python -m launch.bench.transports`: how fast tensors travel between two processes of this host, by each transport.

Throughput is measured over tensors sent one after the other without waiting, latency over single ones: from the call
of `send` to the checked tensor in the receiver's hands; with "+ copy", to the checked copy in memory of its own. Beside
them, in the same run: one memcpy of as many bytes within a process, and a loop of plain pyzmq without checksums. All
take turns, so that other load hits all alike; a turn begins with tensors that are not counted, for memory that has been
idle for a second has to be touched again.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Annotated, Final

import numpy as np
import typer

from broker.embedded import EmbeddedBroker
from broker.transports.nixl_agent import module_name
from common.messages import TensorHeader
from launch.bench.transport_ends import COPIED, PLAIN_ZMQ, Job, Source, make_source, serve_sinks

KIB, MIB = 2**10, 2**20
SIZES: Final = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
MEMCPY: Final = "memcpy"
TRANSPORTS: Final = ("shm", "zmq", "redis", "nixl")
NUM_BUFFERS: Final = 4
TURN_BYTES: Final = 256 * MIB
"""Sent in one turn at most, so that no queue takes more memory than that."""
MAX_PER_TURN: Final = 500
LATENCIES_PER_TURN: Final = 20
WARM_UP: Final = 4
"""The first tensors of a turn, not counted."""
RATIOS: Final = ((MEMCPY, "shm"), (MEMCPY, "shm" + COPIED), (PLAIN_ZMQ, "zmq"))
"""Columns of the first table: how much faster the one is than the other."""
SLOWER: Final = {"redis": 8, "nixl": 4}
"""A turn of these is shorter by so much."""


@dataclass
class Samples:
    """All turns of one way at one size."""

    bytes_per_s: list[float] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)


Measured = dict[tuple[int, str], Samples]


def bench(
    repetitions: Annotated[int, typer.Option(min=1, help="Turns of every way at every size.")] = 5,
    transports: Annotated[
        str, typer.Option(help="With commas; nixl where it is installed. Each may end in ' + copy'.")
    ] = "shm,shm + copy,zmq,redis",
) -> None:
    """Measure the transports of this host and print two tables in markdown."""
    ways = [PLAIN_ZMQ, *transports.split(",")]
    known = {name for name in TRANSPORTS if name != "nixl" or module_name() is not None}
    unknown = {way for way in ways[1:] if way.removesuffix(COPIED) not in known}
    if unknown:
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: not a transport of this host", param_hint="transports")
    with EmbeddedBroker() as broker:
        measured = asyncio.run(_measure(ways, broker, repetitions))
    print(f"{throughput_table(measured, ways)}\n\n{latency_table(measured, ways)}")


async def _measure(ways: Sequence[str], broker: str, repetitions: int) -> Measured:
    pipe, far = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=serve_sinks, args=(os.getpid(), far, ways, broker), daemon=True)
    process.start()
    far.close()
    addresses: dict[str, str] = pipe.recv()
    sources = {way: make_source(way, broker, addresses[way]) for way in ways}
    pool = np.random.default_rng(0).integers(0, 256, NUM_BUFFERS * SIZES[-1], np.uint8)
    copy = np.zeros_like(pool)
    measured: Measured = defaultdict(Samples)
    for repetition in range(-1, repetitions):  # the first one warms up
        print(f"turn {repetition + 1} of {repetitions}", file=sys.stderr, flush=True)
        for size in SIZES:
            buffers = [pool[k * size : (k + 1) * size] for k in range(NUM_BUFFERS)]
            _copy_turn(buffers, [copy[k * size : (k + 1) * size] for k in range(NUM_BUFFERS)], measured[size, MEMCPY])
            for way, source in sources.items():
                turn = _Turn(way, source, pipe, [buffer.data for buffer in buffers])
                await turn.warm_up()
                await turn.throughput(measured[size, way])
                await turn.latency(measured[size, way])
        if repetition < 0:
            measured.clear()
    for source in sources.values():
        source.close()
    pipe.close()
    process.join()
    return measured


@dataclass
class _Turn:
    """One way at one size."""

    way: str
    source: Source
    pipe: Connection
    buffers: Sequence[memoryview]

    async def warm_up(self) -> None:
        await self._send_all(WARM_UP)

    async def throughput(self, samples: Samples) -> None:
        size = self.buffers[0].nbytes
        count = max(2, min(MAX_PER_TURN, TURN_BYTES // size) // SLOWER.get(self.way, 1))
        samples.bytes_per_s.append(count * size / await self._send_all(count) * 1e9)

    async def latency(self, samples: Samples) -> None:
        count = LATENCIES_PER_TURN if self.buffers[0].nbytes <= MIB else LATENCIES_PER_TURN // 2
        self.pipe.send(Job(self.way, count, answer=True))
        began_ns = []
        for number in range(count):
            began_ns.append(time.monotonic_ns())
            await self._send(number)
            await asyncio.to_thread(self.pipe.recv_bytes)
        arrivals_ns: list[int] = self.pipe.recv()
        samples.latencies_s += [(arrived - began) / 1e9 for began, arrived in zip(began_ns, arrivals_ns, strict=True)]

    async def _send_all(self, count: int) -> int:
        """Send one after the other; nanoseconds until the last one has arrived."""
        self.pipe.send(Job(self.way, count, answer=False))
        began_ns = time.monotonic_ns()
        for number in range(count):
            await self._send(number)
        arrivals_ns: list[int] = await asyncio.to_thread(self.pipe.recv)
        return arrivals_ns[-1] - began_ns

    async def _send(self, number: int) -> None:
        data = self.buffers[number % len(self.buffers)]
        await self.source.send(TensorHeader("r", 0, 0, "bench", 1, [data.nbytes], "uint8", data.nbytes), data)


def _copy_turn(sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], samples: Samples) -> None:
    size = sources[0].nbytes
    for number in range(max(2, min(MAX_PER_TURN, TURN_BYTES // size))):
        began_s = time.perf_counter()
        np.copyto(targets[number % len(targets)], sources[number % len(sources)])
        samples.latencies_s.append(time.perf_counter() - began_s)
    samples.bytes_per_s.append(size / float(np.median(samples.latencies_s)))


def throughput_table(measured: Measured, ways: Sequence[str]) -> str:
    """GB/s, medians over the turns; shared memory against memcpy, ZMQ against plain pyzmq."""
    lines = [_row(["GB/s", MEMCPY, *ways, *(f"{one} : {other}" for one, other in RATIOS)])]
    lines.append(_rule(len(ways) + 2 + len(RATIOS)))
    for size in SIZES:
        rates = {way: float(np.median(measured[size, way].bytes_per_s)) / 1e9 for way in (MEMCPY, *ways)}
        ratios = [_ratio(rates, one, other) for one, other in RATIOS]
        lines.append(_row([_size(size), *(f"{rate:.2f}" for rate in rates.values()), *ratios]))
    return "\n".join(lines)


def latency_table(measured: Measured, ways: Sequence[str]) -> str:
    """Microseconds one way, p50 / p99 over all single tensors."""
    lines = [_row(["p50 / p99, µs", MEMCPY, *ways]), _rule(len(ways) + 2)]
    for size in SIZES:
        pairs = (np.percentile(measured[size, way].latencies_s, (50, 99)) * 1e6 for way in (MEMCPY, *ways))
        lines.append(_row([_size(size), *(f"{p50:.0f} / {p99:.0f}" for p50, p99 in pairs)]))
    return "\n".join(lines)


def _ratio(rates: dict[str, float], one: str, other: str) -> str:
    return f"{rates[one] / rates[other]:.2f}" if one in rates and other in rates else "–"


def _size(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(columns: int) -> str:
    return "|" + "---|" * columns


if __name__ == "__main__":
    typer.run(bench)
