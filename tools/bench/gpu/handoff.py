"""A tensor from one process to another, by transport: from GPU to GPU, and from host to host beside that.

The measurement is that of `python -m tools.bench.transports`: one tensor alone (latency), and many in a row (GB/s).
The whole route through a cluster is measured by `serving`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Final

from broker.cluster.embedded import EmbeddedBroker
from tools.bench.gpu.figures import Figure, duration, rate
from tools.bench.gpu.setup import Setup, attempted
from tools.bench.transport_ends import COPIED, NIXL_CUDA
from tools.bench.transports import SIZES, measure_routes, routes_of_this_host, size_in_words

ROUTES: Final = ("cuda" + COPIED, NIXL_CUDA + COPIED, "shm" + COPIED, "zmq")
TOY_ROUTES: Final = ("shm" + COPIED,)
TURNS: Final = 3


def measure(setup: Setup) -> Iterator[Figure]:
    """Two figures for each route of this host and size; the limit is one copy within the device."""
    here = routes_of_this_host()
    with EmbeddedBroker() as broker:
        for route in TOY_ROUTES if setup.toy else ROUTES:
            if route in here:
                yield from attempted("handoff", route, partial(_measure_route, setup, route, broker))


def _measure_route(setup: Setup, route: str, broker: str) -> Iterator[Figure]:
    sizes = SIZES[:1] if setup.toy else SIZES
    measured = asyncio.run(measure_routes([route], broker, TURNS, sizes))
    for size in sizes:
        samples, case = measured[size, route], f"{route}, {size_in_words(size)}"
        least_s = setup.limits.least_s(2 * size)
        yield duration("handoff", f"{case}, single", samples.latencies_s, least_s)
        seconds = [size / bytes_per_s for bytes_per_s in samples.bytes_per_s]
        yield rate("handoff", f"{case}, in a row", "GB/s", seconds, size / 1e9, size / least_s / 1e9)
