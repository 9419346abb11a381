"""Many fake workers in one process, which come, leave and die at random, steered by lines of JSON on standard input:

    {"join": 500}            start so many
    {"losses_per_s": 4.0}    from now on lose so many a second; others come in their place

Each line is answered by one with what has happened so far; the end of the input ends the process. Requests, answers,
entries in the registry and addresses are those of real workers. Three things are not: tensors are their names alone,
sent from process to process by one socket; the heartbeats of a process go to the broker in a few pipelines a second, of
the same commands; and a worker has one connection to the broker, a real one has two.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import zmq
import zmq.asyncio

from broker.cluster.curve import ClusterContext, secure_bind, secure_connect
from broker.cluster.redis_client import connect
from broker.cluster.registry import ABSENCE_S, HEARTBEAT_S, RECORD_TTL_S, Registry
from common.http.connections import allowed_connections
from common.keys import ClusterKey
from common.messages import (
    Role,
    encode,
)
from common.model_info import load_model_info
from common.telemetry import setup_logging
from common.text.processor import TextProcessor
from tests.churn.cell import CrowdSettings
from tests.churn.workers import KINDS, Coming, ComingReader, Delivery
from tests.proxy.fake_cluster import FakeCluster

ROLES: Final[tuple[Role, ...]] = (
    "encoder",
    "prefill_decode",
    "prefill",
    "decode",
    "encode_prefill_decode",
    "prefill_decode",
    "encoder",
    "decode",
    "prefill_decode",
    "encoder",
)
AWAY_S: Final = (0.2, 4.0)
"""After a loss, until another worker comes."""
SLICES: Final = 20
"""Pipelines of heartbeats in a second."""


@dataclass
class Crowd(FakeCluster):
    """The workers of this process."""

    fakes: CrowdSettings = field(kw_only=True)
    alive: dict[str, Coming] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)
    losses_per_s: float = 0.0
    words: list[int] = field(default_factory=list)
    _numbers: Any = field(default_factory=itertools.count)
    _outboxes: dict[str, zmq.asyncio.Socket] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.words = self.text.encode("red blue green sign circle square says one two three", add_special_tokens=False)
        self.draw = random.Random(self.fakes.number)
        self._registry = Registry(self.redis, self.name)
        self.inbox = self.context.socket(zmq.PULL)
        self.inbox_address = secure_bind(self.inbox, "127.0.0.1")
        for work in (self._beat(), self._receive(), self._lose()):
            self.spawn(work)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.wrong.append(repr(task.exception()))

    async def join(self, count: int) -> None:
        for _ in range(count):
            number = next(self._numbers)
            role = ROLES[(number + self.fakes.number) % len(ROLES)]
            await self._begin(role, f"{role.replace('_', '-')}-{self.fakes.number}-{number}")

    async def _begin(self, role: Role, instance_id: str) -> None:
        worker = KINDS[role](self, role, instance_id)
        self.alive[instance_id] = worker
        await worker.join()

    async def deliver(self, delivery: Delivery) -> bool:
        """Send to the process of the destination; False where that has been absent from the registry for ABSENCE_S."""
        found = await self._registry.find([delivery.destination])
        if delivery.destination not in found:
            await asyncio.sleep(ABSENCE_S)
            found = await self._registry.find([delivery.destination])
        if delivery.destination not in found:
            return False
        address = found[delivery.destination].tensor_address
        if address not in self._outboxes:
            self._outboxes[address] = self.context.socket(zmq.PUSH)
            secure_connect(self._outboxes[address], address)
        await self._outboxes[address].send(msgspec.msgpack.encode(delivery))
        return True

    async def _receive(self) -> None:
        while True:
            delivery = msgspec.msgpack.decode(await self.inbox.recv(), type=Delivery)
            worker = self.alive.get(delivery.destination)
            if isinstance(worker, ComingReader) and worker.alive:
                worker.take(delivery)

    async def _beat(self) -> None:
        """As Registry.heartbeat for each worker, some at a time."""
        for number in itertools.count():
            began_s = time.monotonic()
            async with self.redis.pipeline(transaction=False) as pipe:
                for worker in list(self.alive.values())[number % SLICES :: SLICES]:
                    if worker.alive and worker.joined:
                        key = f"{self.name}:instance:{worker.id}"
                        record = msgspec.structs.replace(worker.record, outstanding=worker.num_busy)
                        pipe.get(key)
                        pipe.set(key, encode(record), ex=RECORD_TTL_S)
                        pipe.sadd(f"{self.name}:instances", worker.id)
                await pipe.execute()
            await asyncio.sleep(max(0.0, HEARTBEAT_S / SLICES - (time.monotonic() - began_s)))

    async def _lose(self) -> None:
        while True:
            if not self.losses_per_s:
                await asyncio.sleep(0.05)
                continue
            await asyncio.sleep(self.draw.expovariate(self.losses_per_s))
            there = [
                worker
                for worker in self.alive.values()
                if worker.joined and worker.alive and not worker.record.draining
            ]
            busy = [worker for worker in there if worker.num_busy]
            if there:
                among = busy if busy and self.draw.random() < 0.5 else there
                self.spawn(self._lose_one(self.draw.choice(among)))

    async def _lose_one(self, worker: Coming) -> None:
        end = self.draw.choices(("died", "left", "restarted", "froze"), (45, 30, 20, 5))[0]
        self.events[end] += 1
        self.events["with work"] += bool(worker.num_busy)
        if end == "left":
            await worker.drain()
        elif end == "froze":
            await worker.freeze()
        else:
            await worker.die(leave_entry=True)
        del self.alive[worker.id]
        if end == "restarted":
            await self._begin(worker.role, worker.id)
            return
        await asyncio.sleep(self.draw.uniform(*AWAY_S))
        await self.join(1)

    def figures(self) -> dict[str, Any]:
        return {
            "events": dict(self.events),
            "wrong": [*self.wrong, *(repr(error) for worker in self.alive.values() for error in worker.errors)],
        }


async def main(fakes: CrowdSettings) -> None:
    setup_logging("info", "text", f"fakes-{fakes.number}")  # to stderr: stdout has the answers alone
    allowed_connections(sys.maxsize)  # raises the limit of descriptors
    info = load_model_info(fakes.model)
    context = ClusterContext(ClusterKey(fakes.cluster_key))
    crowd = Crowd(connect(fakes.broker), info, TextProcessor(info), fakes.cluster, context, fakes=fakes)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        order = json.loads(line)
        await crowd.join(order.get("join", 0))
        crowd.losses_per_s = order.get("losses_per_s", crowd.losses_per_s)
        print(json.dumps(crowd.figures()), flush=True)


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=CrowdSettings)))
