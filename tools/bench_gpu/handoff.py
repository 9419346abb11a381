"""The way of an encoder output from one process's GPU memory into another's, by transport.

Between two processes of nothing but their ends, from `send` until the tensor lies checked in the other's GPU memory:
one alone (latency), and several under way (GB/s). Through a whole cluster it is measured where there is one, by
`serving`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Final, cast

import torch

from broker.cluster.embedded import EmbeddedBroker
from broker.transports.nixl.agent import module_name
from common.config import Device, Transport
from tools.bench_gpu.attempts import attempted
from tools.bench_gpu.device_ends import Ends, Way, ends
from tools.bench_gpu.setup import Setup
from tools.gpu_check.figures import Figure, duration, failure, rate

KIB, MIB = 2**10, 2**20
TRANSPORTS: Final[tuple[Transport, ...]] = ("cuda", "shm", "zmq", "nixl", "redis")
TOY_TRANSPORTS: Final[tuple[Transport, ...]] = ("shm",)
SIZES: Final = (64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
TOY_SIZES: Final = (64 * KIB,)
REDIS_BYTES: Final = 4 * MIB
"""Larger ones would take seconds by it."""
SINGLE, TOY_SINGLE, WARM_UP = 20, 3, 3
TURN_BYTES, MOST, LEAST = 256 * MIB, 64, 8
"""Of tensors that several are under way of: so many bytes, but no more and no fewer tensors."""
UNDER_WAY: Final = 4
TURNS: Final = 3


def measure(setup: Setup) -> Iterator[Figure]:
    """Two figures for each transport and size; the limit is one copy within the device. The processes start side by
    side, and nothing is measured while one of them does."""
    transports = TOY_TRANSPORTS if setup.toy else TRANSPORTS
    with EmbeddedBroker() as broker, ExitStack() as stack:
        ways = [Way(name, cast(Device, setup.device.type), broker) for name in transports if _is_there(name)]
        for name in transports:
            if not _is_there(name):
                yield failure("handoff", name, ModuleNotFoundError("not installed on this machine"))
        pairs = [(way, stack.enter_context(ends(way))) for way in ways]
        for _, both in pairs:
            both.wait()
        for way, both in pairs:
            yield from attempted("handoff", way.transport, partial(_measure_transport, setup, way, both))


def _is_there(transport: Transport) -> bool:
    return transport != "nixl" or module_name() is not None


def _measure_transport(setup: Setup, way: Way, both: Ends) -> Iterator[Figure]:
    for size in TOY_SIZES if setup.toy else SIZES:
        if way.transport == "redis" and size > REDIS_BYTES:
            return
        tensor = torch.randn(size // 2, dtype=torch.bfloat16, device=setup.device)
        least_s, case = setup.limits.least_s(2 * size), f"{way.transport}, {in_words(size)}"
        singles = TOY_SINGLE if setup.toy else SINGLE
        both.send_all([tensor] * WARM_UP, under_way=1)
        latencies_s, _ = both.send_all([tensor] * singles, under_way=1)
        yield duration("handoff", f"{case}, one alone", latencies_s, least_s)
        count = max(LEAST, min(MOST, TURN_BYTES // size))
        turns_s = [both.send_all([tensor] * count, UNDER_WAY)[1] for _ in range(TURNS)]
        gigabytes = count * size / 1e9
        yield rate("handoff", f"{case}, {UNDER_WAY} under way", "GB/s", turns_s, gigabytes, size / least_s / 1e9)


def in_words(size: int) -> str:
    return f"{size / MIB:.3g} MiB" if size >= MIB else f"{size / KIB:.3g} KiB"
