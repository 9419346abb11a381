"""Workers without engines that come and go: messages, addresses and entries are real, tensors are their names alone."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from broker.cluster.redis_client import connect
from broker.cluster.registry import Registry
from common.errors import ErrorInfo
from common.keys import ClusterKey
from common.messages import (
    KV_INPUT_ID,
    Encode,
    Encoded,
    Generate,
    Prefilled,
    Role,
    Span,
    ToWorker,
)
from tests.proxy.fake_decoders import FakeDecoder, FakePrefill, FakeReader
from tests.proxy.fake_workers import FakeEncoder, FakeWorker

if TYPE_CHECKING:
    from tests.churn.crowd import Crowd

PACE_S: Final = 0.05
"""Between two tokens of an answer."""
STAGE_S: Final = (0.01, 0.06)
"""For an encoder's output, and for a prompt."""
QUIET_S: Final = 1.5
"""After the last request, until a draining worker goes: proxies look twice a second."""
FROZEN_S: Final = 10.0
"""How long a frozen process is there, silent, before it is gone."""


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

    cluster: Crowd
    joined = False

    async def join(self) -> None:
        fakes = self.cluster.fakes
        self.broker = connect(fakes.broker)
        self.registry = Registry(self.broker, self.cluster.name)
        await self.start(
            requests_address=self.server.address,
            tensor_address=self.cluster.inbox_address,
            encodes=self.role == "encode_prefill_decode",
            key_id=ClusterKey(fakes.cluster_key).key_id,
        )
        self.joined = True

    async def _beat(self) -> None:
        """The process does it."""

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

    def __init__(self, cluster: Crowd, role: Role, instance_id: str) -> None:
        super().__init__(cluster, role, instance_id)
        self.keys: dict[tuple[str, int, int], str] = {}

    def take(self, delivery: Delivery) -> None:
        self.keys[delivery.request_id, delivery.input_id, delivery.attempt] = delivery.key
        self.put_input(delivery.request_id, delivery.input_id)

    async def handle(self, proxy: bytes, message: ToWorker) -> None:
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
