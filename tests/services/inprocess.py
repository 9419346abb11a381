"""A worker in the test's own process, and scripted peers for it: what they say is up to the test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

import msgspec
import zmq.asyncio
from redis.asyncio import Redis

from broker.cluster.registry import Registry
from broker.cluster.rpc import WorkerClient
from broker.handoff.channels import ChannelName, ChannelReader, ChannelSender, Delivery
from broker.transports.factory import TransportContext
from broker.transports.received import PushTarget
from broker.transports.tensors import ReceivedTensor, TensorReceiver, TensorSender
from common.config import EngineConfig, Settings
from common.errors import TriptychError
from common.messages import Encoded, FromWorker, Grant, HandoffMessage, InstanceRecord, KvOffer, Offer, Role, Tokens
from common.model_info import load_model_info
from common.text.processor import TextProcessor
from services.roles.decoder import PrefillDecodeService
from services.roles.encoder import EncoderService
from services.worker_context import RoleService, WorkerContext
from services.worker_process import WorkerProcess
from tests.broker.conftest import running
from tests.broker.transports.transport_kit import next_target, receive
from tests.eventually import eventually
from tests.services.cluster import about_pictures, encode_order, sign
from tests.worker_client import worker_client

CLUSTER = "c"
R = TypeVar("R", bound=RoleService)
M = TypeVar("M", bound=FromWorker)


class InProcess(Generic[R]):
    """A worker with a proxy's connection to it; answers are collected in `answers`."""

    def __init__(self, shell: WorkerProcess, role: R, task: asyncio.Task[int], redis: Redis) -> None:
        self.shell, self.role, self.task = shell, role, task
        self.instance_id = shell.instance_id
        self.registry = Registry(redis, CLUSTER)
        self.answers: list[FromWorker] = []
        self.proxy: WorkerClient

    async def record(self) -> InstanceRecord:
        """This worker's entry in the registry, once it is there."""
        await eventually(self._registered, 60.0)
        found = await self.registry.get(self.instance_id)
        assert found is not None
        return found

    async def _registered(self) -> bool:
        assert not self.task.done(), "the worker has ended"
        return await self.registry.get(self.instance_id) is not None

    async def collect(self) -> None:
        while True:
            self.answers.append(await self.proxy.receive())

    def of(self, kind: type[M], request_id: str) -> list[M]:
        return [answer for answer in self.answers if isinstance(answer, kind) and answer.request_id == request_id]

    async def one(self, kind: type[M], request_id: str) -> M:
        """The first answer of a kind about a request, once it is there."""
        await eventually(lambda: bool(self.of(kind, request_id)), 20.0)
        return self.of(kind, request_id)[0]

    async def text(self, request_id: str) -> str:
        return TextProcessor(load_model_info("signpost")).decode(await self.token_ids(request_id))

    async def token_ids(self, request_id: str) -> list[int]:
        """The answer to a request, once it is whole."""
        await eventually(lambda: any(message.done for message in self.of(Tokens, request_id)), 20.0)
        return [token for message in self.of(Tokens, request_id) for token in message.token_ids]

    def gauge(self, name: str) -> float:
        return self.shell._context.metrics.gauges[name]()

    def tally(self, name: str) -> dict[str, int]:
        return dict(self.shell._context.metrics.tallies[name]())


@asynccontextmanager
async def in_process(
    broker_url: str,
    redis: Redis,
    zmq_context: zmq.asyncio.Context,
    role: Callable[[WorkerContext], R],
    *,
    engine: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[InProcess[R]]:
    """Run a worker, `w0` unless named otherwise, for the length of the block; it must end cleanly."""
    config = EngineConfig(**{"num_threads": 1, "kv_cache_bytes": 16 * 2**20, **(engine or {})})
    values = {"broker": broker_url, "cluster": CLUSTER, "instance_id": "w0", "port": 0, "engine": config} | settings
    roles: list[R] = []

    def make(context: WorkerContext) -> R:
        roles.append(role(context))
        return roles[0]

    shell = WorkerProcess(Settings(**values), load_model_info("signpost"), "float32", make)
    task = asyncio.create_task(shell.run())
    worker = InProcess(shell, roles[0], task, redis)
    try:
        address = (await worker.record()).requests_address
        async with worker_client(zmq_context, address, "proxy") as worker.proxy, running(worker.collect()):
            yield worker
    finally:
        shell.stop.set()
        assert await task == 0


async def colour_seen(
    encoder: InProcess[EncoderService], decoder: InProcess[PrefillDecodeService], request_id: str, colour: str
) -> str:
    """What the decoder `d0` answers about a sign, after the encoder has handed it over."""
    media = sign(colour)
    decoder.proxy.send(about_pictures(request_id, [media], "What colour is the sign?"))
    encoder.proxy.send(encode_order(request_id, 0, media))
    assert (await encoder.one(Encoded, request_id)).error is None
    return await decoder.text(request_id)


class Peer:
    """The other side of a handoff under test: instance `peer`, of a role, that does only what it is told."""

    def __init__(self, redis: Redis, zmq_context: zmq.asyncio.Context, worker: InstanceRecord, role: Role) -> None:
        self.instance_id = "peer"
        self.worker = worker
        self.redis = redis
        self._registry = Registry(redis, CLUSTER)
        self._channels = ChannelSender(redis, CLUSTER)
        receives = role in ("prefill_decode", "decode")
        names: tuple[ChannelName, ...] = ("metadata",) if receives else ("allocated", "injected")
        self._reader = ChannelReader(redis, CLUSTER, self.instance_id, names)
        self._receiver = TensorReceiver(TransportContext(zmq_context), max_bytes=2**26)
        self.tensors = TensorSender(TransportContext(zmq_context))
        self.received: list[HandoffMessage] = []
        self.record = msgspec.structs.replace(
            worker, instance_id=self.instance_id, role=role, epoch=7, tensor_address=self._receiver.address
        )

    @asynccontextmanager
    async def alive(self) -> AsyncIterator[Peer]:
        await self._reader.open()
        await self._registry.register(self.record)
        async with running(self._channels.run(), self._reader.run(self._take), self._beat()):
            yield self
        await self._registry.unregister()
        await self._reader.delete()
        self._receiver.close()
        self.tensors.close()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            with contextlib.suppress(TriptychError):  # after `vanish`
                await self._registry.heartbeat()

    def _take(self, delivery: Delivery) -> None:
        self.received.append(delivery.message)

    def of(self, kind: type[HandoffMessage], request_id: str) -> list[Any]:
        """All messages of a kind about a request."""
        return [m for m in self.received if isinstance(m, kind) and m.request_id == request_id]

    async def message(self, kind: type[HandoffMessage], request_id: str, count: int = 1) -> Any:
        """The `count`-th message of a kind about a request, once it is there."""
        await eventually(lambda: len(self.of(kind, request_id)) >= count, 20.0)
        return self.of(kind, request_id)[count - 1]

    def send(self, channel: ChannelName, *messages: HandoffMessage) -> None:
        for message in messages:
            self._channels.send(self.worker.instance_id, channel, message)

    async def vanish(self) -> None:
        """Leave the registry without a word to anybody."""
        await self._registry.unregister()

    def grant(self, offer: Offer | KvOffer, **changes: Any) -> None:
        values = {"status": "granted"} | changes
        self.send("allocated", Grant(offer.request_id, offer.input_id, offer.attempt, **values))

    async def pushed(self) -> PushTarget:
        """Memory that is given for a tensor to come."""
        async with asyncio.timeout(10):
            return await next_target(self._receiver)

    async def tensor(self) -> ReceivedTensor:
        """What has come, its bytes looked at."""
        async with asyncio.timeout(10):
            return await receive(self._receiver)
