"""Dynamo 1.6.1 beside it: its frontend, and processes full of its mockers, which are killed or stopped under load.

make churn-test DYNAMO=1, or python -m tests.churn.dynamo --help. Workers are found by files, and requests go by TCP,
without etcd and NATS. Every worker watches all files of its folder, so that thousands in one folder do nothing else.
Here each process has a folder of its own, from which the frontend's gets what it must know.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import multiprocessing
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from common.model_info import resolve_model
from common.process.ports import reserve_port
from launch.cli.client import read_events
from tests.churn.load import at_once
from tests.eventually import eventually

MODEL: Final = "mocked"
TOKENS: Final = 64
SILENCE_S: Final = 60.0
"""A stream that says nothing for longer has no end."""
BUCKETS: Final = ("mdc", "instances")
"""What the frontend reads of a worker: its model's card, its address."""
MIRROR_S: Final = 0.5
STARTING: Final = 4
"""Processes that start at once, before the load."""


def mirror(folder: Path) -> None:
    """Copy what has changed in the mockers' folders to the frontend's, again and again, with the times of the files: by
    them the frontend knows who lives. In a process of its own: nobody must seem dead because clients are busy. It looks
    at intervals much shorter than the 10 s after which a worker counts as dead.
    """
    times: dict[str, int] = {}
    copies = {bucket: folder / "frontend" / "v1" / bucket for bucket in BUCKETS}
    for copy in copies.values():
        copy.mkdir(parents=True, exist_ok=True)
    while True:
        began_s = time.monotonic()
        for source in folder.glob("mockers-*/v1/*/"):
            if source.name in copies:
                _take_over(source, copies[source.name], times)
        if (lag_s := time.monotonic() - began_s) > MIRROR_S:
            print(f"copied in {lag_s:.1f} s", flush=True)
        time.sleep(MIRROR_S)


def _take_over(source: Path, target: Path, times: dict[str, int]) -> None:
    for entry in os.scandir(source):
        if "%2Fgenerate%2F" not in entry.name or times.get(entry.path) == (changed := entry.stat().st_mtime_ns):
            continue  # other addresses of a worker are for routers that look into caches
        copy = f"{target}/{entry.name}"
        if entry.path not in times:
            shutil.copyfile(entry.path, f"{target}/../{entry.name}")
            os.rename(f"{target}/../{entry.name}", copy)
        times[entry.path] = changed
        with contextlib.suppress(FileNotFoundError):  # the frontend has given it up
            os.utime(copy, ns=(changed, changed))


@dataclass
class Mockers:
    """Processes of so many workers each."""

    python: Path
    folder: Path
    workers_each: int
    running: dict[Path, subprocess.Popen[bytes]] = field(default_factory=dict)
    lost: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def start(self) -> None:
        folder = self.folder / f"mockers-{next(self._numbers)}"
        words = ["--model-path", str(resolve_model("signpost")), "--model-name", MODEL]
        words += ["--num-workers", str(self.workers_each), "--no-enable-prefix-caching"]
        self.running[folder] = start(self.python, "dynamo.mocker", words, folder)

    def lose(self, end: signal.Signals) -> None:
        """Kill or stop the one that has lived longest."""
        folder = next(iter(self.running))
        process = self.running.pop(folder)
        process.send_signal(end)
        self.lost.append(process)

    def end(self) -> None:
        for process in [*self.running.values(), *self.lost]:
            process.kill()
            process.wait()


def start(python: Path, module: str, words: list[str], folder: Path) -> subprocess.Popen[bytes]:
    folder.mkdir()
    environment = {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(folder),
        "DYN_LOG": "error",
        "HF_HUB_OFFLINE": "1",
    }
    with folder.with_suffix(".log").open("wb") as log:
        command = [str(python), "-m", module, *words]
        return subprocess.Popen(command, env={**os.environ, **environment}, stdout=log, stderr=log)


async def ask(http: httpx.AsyncClient, number: int) -> str:
    """Read one stream to its end, and say how it ended."""
    try:
        return await _read(http, number)
    except httpx.ReadTimeout:
        return "without an end"
    except httpx.TransportError:
        return "cut short"


async def _read(http: httpx.AsyncClient, number: int) -> str:
    body = {"model": MODEL, "prompt": f"{number} " + "one two three " * 10, "max_tokens": TOKENS, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    async with http.stream("POST", "/v1/completions", json=body, timeout=SILENCE_S) as response:
        if not response.is_success:
            return "refused"
        usage: dict[str, Any] = {}
        async for event in read_events(response.aiter_lines()):
            if event is None:
                return "right" if usage.get("completion_tokens") == TOKENS else "wrong"
            if "error" in event:
                return "cut short"
            usage = event.get("usage") or usage
    return "cut short"


@dataclass(frozen=True)
class Plan:
    """What is lost, and under which load."""

    processes: int
    workers_each: int
    requests: int
    in_flight: int
    losses_per_s: float
    end: signal.Signals


async def measure(python: Path, plan: Plan, folder: Path) -> Counter[str]:
    with ExitStack() as stack:
        port = reserve_port("127.0.0.1", 0)
        words = ["--http-port", str(port), "--router-mode", "round-robin", "--migration-limit", "3"]
        frontend = start(python, "dynamo.frontend", words, folder / "frontend")
        stack.callback(frontend.wait)
        stack.callback(frontend.kill)
        mockers = Mockers(python, folder, plan.workers_each)
        stack.callback(mockers.end)
        copying = multiprocessing.get_context("spawn").Process(target=mirror, args=(folder,), daemon=True)
        copying.start()
        stack.callback(copying.kill)
        url, whole = f"http://127.0.0.1:{port}", plan.processes * plan.workers_each
        for number in range(plan.processes):
            mockers.start()
            await eventually(functools.partial(_uses, url, (number + 1 - STARTING) * plan.workers_each), 120.0)
        await eventually(functools.partial(_uses, url, whole), 120.0)
        print(f"{whole} workers", flush=True)
        await eventually(functools.partial(_answers, url), 60.0)
        quiet = await at_once(url, range(plan.in_flight), plan.in_flight, ask)
        assert set(quiet) == {"right"}, Counter(quiet)
        losing = asyncio.create_task(_lose(mockers, plan))
        began_s = time.monotonic()
        ends = await at_once(url, range(plan.requests), plan.in_flight, ask)
        if not losing.cancel():
            losing.result()  # raises what has ended it
        elapsed_s = time.monotonic() - began_s
        print(f"{len(mockers.lost)} processes of {plan.workers_each} workers lost in {elapsed_s:.0f} s")
    return Counter(ends)


async def _uses(url: str, count: int) -> bool:
    """Whether the frontend knows so many workers."""
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
            instances = (await http.get(f"{url}/health")).json()["instances"]
    except httpx.TransportError:
        return False
    return len([one for one in instances if one["endpoint"] == "generate"]) >= count


async def _answers(url: str) -> bool:
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as http:
        return await ask(http, 0) == "right"


async def _lose(mockers: Mockers, plan: Plan) -> None:
    """Lose one after the other; another comes in the place of each."""
    while True:
        await asyncio.sleep(1 / plan.losses_per_s)
        mockers.lose(plan.end)
        mockers.start()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.churn.dynamo", description=__doc__)
    parser.add_argument("--python", type=Path, required=True, help="of an environment with Dynamo")
    parser.add_argument("--processes", type=int, default=50)
    parser.add_argument("--workers-each", type=int, default=50)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--losses-per-s", type=float, default=0.8, help="processes, not workers")
    parser.add_argument("--stop", action="store_true", help="stop processes (SIGSTOP) instead of killing them")
    given = parser.parse_args()
    logs = Path(tempfile.mkdtemp(prefix="triptych-dynamo-"))
    print(f"logs: {logs}")
    end = signal.SIGSTOP if given.stop else signal.SIGKILL
    plan = Plan(given.processes, given.workers_each, given.requests, given.in_flight, given.losses_per_s, end)
    ends = asyncio.run(measure(given.python, plan, logs))
    print(", ".join(f"{ends[end]} {end}" for end in ("right", "refused", "cut short", "wrong", "without an end")))
