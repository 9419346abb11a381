"""Many fake workers in one process, which come, leave and die at random, steered by lines of JSON on standard input:

    {"join": 500}            start so many
    {"losses_per_s": 4.0}    from now on lose so many a second; others come in their place
    {"end": true}            all leave, and the process ends

Each line is answered by one with the figures of the process. Requests, answers, entries in the registry and addresses
are those of real workers. Three things are not: tensors are their names alone, sent from process to process by one
socket; the heartbeats of a process go to the broker in a few pipelines a second, of the same commands; and a worker has
one connection to the broker, a real one has two.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import zmq
import zmq.asyncio

from broker.cluster.curve import ClusterContext, secure_client, secure_listener
from broker.cluster.redis_client import connect
from broker.cluster.registry import ABSENCE_S, HEARTBEAT_S, RECORD_TTL_S, Registry
from common.errors import ErrorInfo
from common.http.connections import allowed_connections
from common.keys import ClusterKey
from common.messages import (
    KV_INPUT_ID,
    Encode,
    Encoded,
    FromWorker,
    Generate,
    Inquiry,
    Prefilled,
    Role,
    Span,
    Tokens,
    ToWorker,
    encode,
)
from common.model_info import load_model_info
from common.text.processor import TextProcessor
from tests.churn.cell import Fakes
from tests.proxy.fake_cluster import FakeCluster
from tests.proxy.fake_decoders import FakeDecoder, FakePrefill, FakeReader
from tests.proxy.fake_workers import FakeEncoder, FakeWorker

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
PACE_S: Final = 0.05
"""Between two tokens of an answer."""
STAGE_S: Final = (0.01, 0.06)
"""For an encoder's output, and for a prompt."""
QUIET_S: Final = 1.5
"""After the last request, until a draining worker goes: proxies look twice a second."""
FROZEN_S: Final = 10.0
"""How long a frozen process is there, silent, before it is gone."""
AWAY_S: Final = (0.2, 4.0)
"""After a loss, until another worker comes."""
SLICES: Final = 20
"""Pipelines of heartbeats in a second."""


class Delivery(msgspec.Struct, frozen=True, array_like=True):
    """An input of a request for a reader: the name of what real workers send, `key`.

    `input_id` is KV_INPUT_ID for a prompt, whose name is that of the answer to come.
    """

    destination: str
    request_id: str
    input_id: int
    attempt: int
    key: str


class Coming(FakeWorker):
    """What all of these have: a connection to the broker, heartbeats by their process, and several ends."""

    cluster: Cell
    joined = False

    async def join(self) -> None:
        fakes = self.cluster.fakes
        self.broker = connect(fakes.broker)
        self.registry = Registry(self.broker, self.cluster.name)
        await self.start(
            requests_address=self.server.address,
            tensor_address=self.cluster.inbox_address,
            encodes=self.role == "encode_prefill_decode",
            key_id="" if fakes.cluster_key is None else ClusterKey(fakes.cluster_key).key_id,
        )
        self.joined = True

    async def _beat(self) -> None:
        """The process does it."""

    def tell(self, request_id: str, *what: object) -> None:
        """Add to the story of a request."""
        at = time.strftime("%X", time.gmtime()) + f"{time.time() % 1:.3f}"[1:]
        self.cluster.stories.setdefault(request_id, []).append(" ".join(map(str, (at, self.id, *what))))

    async def reply(self, proxy: bytes, message: FromWorker) -> None:
        outcome = self.server.send(proxy, message)
        if outcome != "sent" or not isinstance(message, Tokens):
            self.tell(message.request_id, outcome, type(message).__name__, getattr(message, "attempt", None), proxy)

    async def note(self, proxy: bytes, message: ToWorker) -> None:
        if not isinstance(message, Inquiry):
            self.tell(message.request_id, "got", type(message).__name__, getattr(message, "attempt", None), proxy)

    @property
    def num_busy(self) -> int:
        return max(0, len(self._tasks) - 1)  # one receives

    async def freeze(self) -> None:
        """As a stopped process: the connections stay, nothing is said or heard, the entry expires."""
        self.alive = False
        for task in list(self._tasks):
            task.cancel()
        await asyncio.sleep(FROZEN_S)
        self.alive = True
        await self.die(leave_entry=True)

    async def drain(self) -> None:
        """As after SIGTERM: takes nothing new, ends what it has, and leaves."""
        self.record = msgspec.structs.replace(self.record, draining=True)
        await self.registry.heartbeat(draining=True)
        quiet_s = 0.0
        while self.alive and quiet_s < QUIET_S:
            await asyncio.sleep(0.1)
            quiet_s = 0.0 if self.num_busy else quiet_s + 0.1
        await self.die()

    async def die(self, *, leave_entry: bool = False) -> None:
        await super().die(leave_entry=leave_entry)
        await self.broker.aclose()


class ComingEncoder(Coming, FakeEncoder):
    """Takes a moment for each item, and delivers its name."""

    async def handle(self, proxy: bytes, message: ToWorker) -> None:
        await self.note(proxy, message)
        if not isinstance(message, Encode):
            return
        began_s = time.time()
        await asyncio.sleep(random.uniform(*STAGE_S))
        key = f"{message.content_hash} of {len(message.media)}"
        there = await self.cluster.deliver(
            Delivery(message.destination, message.request_id, message.input_id, message.request_attempt, key)
        )
        error = None if there else ErrorInfo("unavailable", f"{message.destination} is not in the registry")
        spans = [Span("encode", self.id, began_s, time.time())]
        outcome = Encoded(message.request_id, message.input_id, message.attempt, error=error, spans=spans)
        await self.reply(proxy, outcome)


class ComingReader(Coming, FakeReader):
    """Waits for the inputs of a request, whichever attempt they are of, and looks whether they are the right ones."""

    def take(self, delivery: Delivery) -> None:
        self.tell(delivery.request_id, "took", delivery.input_id, delivery.attempt)
        self.keys[delivery.request_id, delivery.input_id, delivery.attempt] = delivery.key
        self.put_input(delivery.request_id, delivery.input_id)

    @property
    def keys(self) -> dict[tuple[str, int, int], str]:
        return self.__dict__.setdefault("_keys", {})

    async def handle(self, proxy: bytes, message: ToWorker) -> None:
        await self.note(proxy, message)
        if isinstance(message, Encode) and (self.role != "encode_prefill_decode" or message.destination != self.id):
            error = ErrorInfo("invalid_request", f"{self.id} is a {self.role} worker: it does not encode that")
            await self.reply(proxy, Encoded(message.request_id, message.input_id, message.attempt, error))
        elif isinstance(message, Encode):
            key = f"{message.content_hash} of {len(message.media)}"
            self.take(Delivery(self.id, message.request_id, message.input_id, message.request_attempt, key))
            await self.reply(proxy, Encoded(message.request_id, message.input_id, message.attempt))
        else:
            await super().handle(proxy, message)

    async def take_inputs(self, proxy: bytes, message: Generate) -> None:
        await super().take_inputs(proxy, message)
        for slot in message.inputs:
            came = {
                key
                for (request, number, _), key in self.keys.items()
                if (request, number) == (message.request_id, slot.input_id)
            }
            if {key.partition(" ")[0] for key in came} != {slot.content_hash}:
                self.cluster.wrong.append(f"{self.id}: input {slot.input_id} of {message.request_id} is {came}")
        await asyncio.sleep(random.uniform(*STAGE_S))


class ComingPrefill(ComingReader, FakePrefill):
    """Delivers the name of the prompt to the decoder."""

    async def run(self, proxy: bytes, message: Generate) -> None:
        began_s = time.time()
        await self.take_inputs(proxy, message)
        there = await self.cluster.deliver(
            Delivery(
                message.prefill_for, message.request_id, KV_INPUT_ID, message.prefill_for_attempt, name_of(message)
            )
        )
        error = None if there else ErrorInfo("unavailable", f"{message.prefill_for} is not in the registry")
        spans = [Span("prefill", self.id, began_s, time.time())]
        await self.reply(proxy, Prefilled(message.request_id, message.attempt, error, spans))


class ComingDecoder(ComingReader, FakeDecoder):
    """Answers with tokens drawn from the prompt and its inputs, at PACE_S."""

    async def run(self, proxy: bytes, message: Generate) -> None:
        name = name_of(message)
        if message.prefilled:
            place = message.request_id, KV_INPUT_ID, message.attempt
            async with self._arrived:
                await self._arrived.wait_for(lambda: place in self.keys)
            if self.keys[place] != name:
                self.cluster.wrong.append(f"{self.id}: the prompt of {message.request_id} is another's")
        else:
            await self.take_inputs(proxy, message)
        draw = random.Random(name)
        self.answer = lambda message: [draw.choice(self.cluster.words) for _ in range(message.sampling.max_tokens)]
        tokens: Tokens
        for tokens in self.messages(message):
            await asyncio.sleep(PACE_S)
            await self.reply(proxy, msgspec.structs.replace(tokens, attempt=message.attempt))


def name_of(message: Generate) -> str:
    """Return a name of all that an answer depends on."""
    media = [(slot.input_id, slot.content_hash, slot.prompt_index) for slot in message.inputs]
    return hashlib.sha256(repr((message.prompt_token_ids, media)).encode()).hexdigest()


KINDS: Final[dict[Role, Callable[..., Coming]]] = {
    "encoder": ComingEncoder,
    "prefill": ComingPrefill,
    "prefill_decode": ComingDecoder,
    "decode": ComingDecoder,
    "encode_prefill_decode": ComingDecoder,
}


@dataclass
class Cell(FakeCluster):
    """The workers of this process."""

    fakes: Fakes = field(kw_only=True)
    alive: dict[str, Coming] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)
    stories: dict[str, list[str]] = field(default_factory=dict)
    losses_per_s: float = 0.0
    words: list[int] = field(default_factory=list)
    _numbers: Any = field(default_factory=itertools.count)
    _outboxes: dict[str, zmq.asyncio.Socket] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.words = self.text.encode("red blue green sign circle square says one two three", add_special_tokens=False)
        self.draw = random.Random(self.fakes.number)
        self.inbox = self.context.socket(zmq.PULL)
        secure_listener(self.inbox)
        self.inbox.bind("tcp://127.0.0.1:*")
        self.inbox_address = str(self.inbox.getsockopt_string(zmq.LAST_ENDPOINT))
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
            secure_client(self._outboxes[address])
            self._outboxes[address].connect(address)
        await self._outboxes[address].send(msgspec.msgpack.encode(delivery))
        return True

    @property
    def _registry(self) -> Registry:
        return Registry(self.redis, self.name)

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
        there = [worker for worker in self.alive.values() if worker.alive]
        return {
            "alive": len(there),
            "busy": sum(bool(worker.num_busy) for worker in there),
            "events": dict(self.events),
            "wrong": [*self.wrong, *(repr(error) for worker in self.alive.values() for error in worker.errors)],
        }

    async def end(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        for worker in list(self.alive.values()):
            with contextlib.suppress(Exception):
                await worker.die()


async def main(fakes: Fakes) -> None:
    allowed_connections(sys.maxsize)  # raises the limit of descriptors
    info = load_model_info(fakes.model)
    key = None if fakes.cluster_key is None else ClusterKey(fakes.cluster_key)
    context = ClusterContext(key)
    cell = Cell(connect(fakes.broker), info, TextProcessor(info), fakes.cluster, context, fakes=fakes)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        order = json.loads(line)
        await cell.join(order.get("join", 0))
        cell.losses_per_s = order.get("losses_per_s", cell.losses_per_s)
        if "end" in order:
            break
        if "story" in order:
            print(json.dumps(cell.stories.get(order["story"], [])), flush=True)
            continue
        print(json.dumps(cell.figures()), flush=True)
    await cell.end()
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Fakes)))
