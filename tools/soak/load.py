"""Keeps a number of requests in flight, in a process of its own: what that takes is not the services'.

LoadProcess, in the process of the supervisors ──Job──▶ `python -m tools.soak.load` ──Tally, twice a second──▶
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import httpx
import msgspec

from common.config import Settings
from common.errors import TriptychError
from launch.cluster.children import describe_exit, follow_parent
from tools.soak.asking import send
from tools.soak.asks import DRAWS, Ask
from tools.soak.tally import Judge, Tally

PAUSE_S: Final = 0.5
"""After a refusal, before the next request."""
SILENCE_S: Final = Settings.model_fields["request_timeout_s"].default + 60.0
"""How long a client hears nothing before it calls that a failure: by then the proxy has promised to have ended it."""
_SEND_S: Final = 0.5
_LINE_BYTES: Final = 2**20


@dataclass(frozen=True)
class Job:
    """`kind`: of requests, a key of `asks.DRAWS`, drawn from `seed`, for a model by its name in the API."""

    kind: str
    model: str
    seed: str
    base_url: str
    in_flight: int
    seconds: float


class LoadProcess:
    """The load of one cluster: `run` it and look at `tally` meanwhile. It ends with this process."""

    def __init__(self) -> None:
        self.tally = Tally()
        self.pid: int | None = None

    async def run(self, job: Job) -> None:
        """Return when its last request has ended. Raises TriptychError("internal_error") where it ends otherwise."""
        argv = (sys.executable, "-m", "tools.soak.load", msgspec.json.encode(job).decode())
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe, limit=_LINE_BYTES)
        self.pid = process.pid
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                self.tally = msgspec.json.decode(line, type=Tally)
            if code := await process.wait():
                raise TriptychError("internal_error", f"the load of {job.kind} ended early: {describe_exit(code)}")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            self.pid = None


async def run_load(base_url: str, asks: Iterator[Ask], judge: Judge, *, in_flight: int, seconds: float) -> None:
    """Send asks until the time is over, `in_flight` at once and each at least once; returns when the last has ended."""
    end_s = time.monotonic() + seconds
    limits = httpx.Limits(max_connections=None, keepalive_expiry=20)
    timeout = httpx.Timeout(SILENCE_S)  # connecting takes long where this very process waits for a core
    async with httpx.AsyncClient(base_url=base_url, timeout=timeout, limits=limits, trust_env=False) as http:

        async def work() -> None:
            while True:
                ask = next(asks)
                reply = await send(http, ask)
                judge.note(ask, reply)
                if time.monotonic() >= end_s:
                    return
                if reply.ending not in ("whole", "left"):
                    await asyncio.sleep(PAUSE_S)

        await asyncio.gather(*(work() for _ in range(in_flight)))


async def _main(job: Job) -> None:
    """Run the process: it sends its tally now and then, and once more at the end."""
    judge = Judge()

    async def send_often() -> None:
        while True:
            _send_tally(judge.tally)
            await asyncio.sleep(_SEND_S)

    sending = asyncio.create_task(send_often())
    asks = DRAWS[job.kind](job.model, random.Random(job.seed))
    await run_load(job.base_url, asks, judge, in_flight=job.in_flight, seconds=job.seconds)
    sending.cancel()
    _send_tally(judge.tally)


def _send_tally(tally: Tally) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(tally) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    follow_parent()
    asyncio.run(_main(msgspec.json.decode(sys.argv[1], type=Job)))
