"""How a cell bears thousands of workers that come and go: `make churn-test`, or python -m tests.churn --help."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.churn import load
from tests.churn.cell import Cell, Usage, cell

SIZES: Final = (25, 250, 2500)
PROCESSES: Final = 5
IDLE_S: Final = 10.0
SHORT, LONG = 8, 72
"""Tokens of the answers whose cost tells that of a token from that of a request."""
COMPARED: Final = 160
"""Answers of each length."""


@dataclass(frozen=True)
class Costs:
    """What the proxy and the broker take at one size of the cell, of one core."""

    workers: int
    join_s: float
    idle: Usage
    proxy_idle: float
    broker_idle: float
    request_ms: float
    token_us: float

    def line(self, empty: Usage) -> str:
        per_worker = (self.idle.proxy_bytes - empty.proxy_bytes) / self.workers / 2**10
        broker_per_worker = (self.idle.broker_bytes - empty.broker_bytes) / self.workers / 2**10
        descriptors = (self.idle.proxy_descriptors - empty.proxy_descriptors) / self.workers
        return (
            f"{self.workers:8} {self.join_s:8.1f} {100 * self.proxy_idle:9.1f} {100 * self.broker_idle:9.1f}"
            f" {per_worker:9.0f} {broker_per_worker:9.0f} {descriptors:9.1f} {self.request_ms:9.1f}"
            f" {self.token_us:9.0f}"
        )


HEADER: Final = (
    " workers  join, s    proxy    broker      KiB a worker      desc. a   proxy ms proxy us\n"
    "                    idle, %   idle, %    proxy    broker    worker  a request   a token"
)


async def costs(one: Cell, workers: int) -> Costs:
    """Grow the cell, and measure it idle and with answers of two lengths."""
    join_s = await one.grow(workers)
    before = one.usage()
    await asyncio.sleep(IDLE_S)
    idle = one.usage()
    elapsed_s = idle.time_s - before.time_s
    proxy_idle = (idle.proxy_s - before.proxy_s) / elapsed_s
    short_s, long_s = [await _busy_s(one, tokens, proxy_idle) for tokens in (SHORT, LONG)]
    token_s = (long_s - short_s) / COMPARED / (LONG - SHORT)
    request_s = short_s / COMPARED - SHORT * token_s
    broker_idle = (idle.broker_s - before.broker_s) / elapsed_s
    return Costs(workers, join_s, idle, proxy_idle, broker_idle, 1e3 * request_s, 1e6 * token_s)


async def _busy_s(one: Cell, tokens: int, idle: float) -> float:
    """Return what the answers took of the proxy, beyond what it takes anyway."""
    questions = load.asks(COMPARED, tokens)
    before = one.usage()
    await load.expect(one.url, questions)
    after = one.usage()
    return after.proxy_s - before.proxy_s - idle * (after.time_s - before.time_s)


async def churn(one: Cell, requests: int, in_flight: int, losses_per_s: float) -> bool:
    """Ask while workers are lost and others come; return whether every request ended, and none wrong."""
    questions = load.asks(60, 24)
    expected = await load.expect(one.url, questions)
    one.tell({"losses_per_s": losses_per_s / len(one.crowds)})
    before = one.usage()
    outcome = await load.ask(one.url, expected, questions, requests, in_flight)
    after = one.usage()
    one.tell({"losses_per_s": 0})
    events, wrong = one.events()
    elapsed_s = after.time_s - before.time_s
    lost = ", ".join(f"{number} {what}" for what, number in events.items() if what != "with work")
    print(
        f"\n{requests} requests, {in_flight} at once, in {elapsed_s:.0f} s; workers: {lost}; "
        f"{events['with work']} with work"
    )
    print(
        f"proxy {100 * (after.proxy_s - before.proxy_s) / elapsed_s:.0f} % of a core, broker "
        f"{100 * (after.broker_s - before.broker_s) / elapsed_s:.0f} %"
    )
    print("\n".join(outcome.told[:10] + wrong[:10]))
    counts = {end: outcome.counts[end] for end in ("right", "refused", "closed", "broken", "wrong", "without an end")}
    print(", ".join(f"{number} {end}" for end, number in counts.items()))
    return not wrong and counts["right"] + counts["refused"] == requests


async def main(workers: int, requests: int, in_flight: int, losses_per_s: float, logs: Path) -> bool:
    print(f"logs: {logs}")
    with cell(logs, processes=PROCESSES, max_inflight=2 * in_flight) as one:
        await one.ready()
        empty = one.usage()
        lines = []
        for size in [size for size in SIZES if size < workers] + [workers]:
            began_s = time.monotonic()
            lines.append((await costs(one, size)).line(empty))
            print(f"{size} workers measured in {time.monotonic() - began_s:.0f} s", flush=True)
        all_right = await churn(one, requests, in_flight, losses_per_s)
    print(f"\n{HEADER}\n" + "\n".join(lines))
    return all_right


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.churn", description=__doc__)
    parser.add_argument("--workers", type=int, default=2500)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--losses-per-s", type=float, default=20.0)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="triptych-churn-"))
    sys.exit(not asyncio.run(main(given.workers, given.requests, given.in_flight, given.losses_per_s, folder)))
