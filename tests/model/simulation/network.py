"""Everything between the processes of a simulated cluster: what has been sent and has not arrived.

    loose    messages of the handoff channels, and tensors: may arrive in any order, twice, damaged, or never
    lines    connections between a proxy and a worker: in order, until one side dies

Nothing moves by itself: the simulation says what arrives next.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from broker.cluster.registry import RECORD_TTL_S
from broker.cluster.rpc import Outcome
from broker.handoff.channels import ChannelName
from broker.transports.checksums import with_checksum
from broker.transports.received import ReceivedTensor
from common.errors import TriptychError
from common.hashing import checksum
from common.messages import (
    FromWorker,
    HandoffMessage,
    Heartbeat,
    InstanceRecord,
    TensorHeader,
    ToWorker,
    decode_from_worker,
    decode_handoff,
    encode,
    make_decode,
)

T = TypeVar("T")
decode_header = make_decode(TensorHeader)
SILENCE_S = 31.0
"""How long a client of the broker asks one that says nothing: six times five seconds, and the pauses."""


@dataclass(frozen=True)
class Letter:
    """One message of a channel, or one tensor, on its way to an instance.

    `epoch` is that of the life it was sent to; None where there was none: whoever comes next gets it.
    """

    target: str
    channel: ChannelName | None
    message: bytes
    epoch: int | None
    data: bytes = b""
    damaged: bool = False

    def describe(self) -> str:
        message = self.read()
        what = type(message).__name__
        status = f" {message.status}" if hasattr(message, "status") else ""
        part = f" part {message.table}/{message.part}" if getattr(message, "table", "") else ""
        name = f"{message.request_id}/{message.input_id}/{message.attempt}"
        return f"{what}{status}{part} of {name} to {self.target}{' (damaged)' if self.damaged else ''}"

    def read(self) -> HandoffMessage | TensorHeader:
        return decode_header(self.message) if self.channel is None else decode_handoff(self.message)

    def tensor(self) -> ReceivedTensor:
        data = bytearray(self.data)
        if self.damaged:
            data[0] ^= 1
        return ReceivedTensor(decode_header(self.message), memoryview(data))


@dataclass(eq=False)
class Connection:
    """A proxy's connection to one life of a worker. None in `to_proxy` means: it is lost."""

    identity: bytes
    worker: tuple[str, int]
    to_worker: deque[tuple[float, bytes]] = field(default_factory=deque)
    """As they were sent, and when."""
    to_proxy: deque[FromWorker | None] = field(default_factory=deque)
    received: asyncio.Queue[FromWorker] = field(default_factory=asyncio.Queue)
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    closed: bool = False


class Network:
    """Messages under way, connections, and the registry."""

    def __init__(self) -> None:
        self.loose: list[Letter] = []
        self.broker_is_away = False
        self.broker_answers = asyncio.Event()
        """Not set while the broker stands still: whoever asks it something waits."""
        self.broker_answers.set()
        self.connections: dict[bytes, Connection] = {}
        self.epochs: dict[str, int] = {}
        """The lives that are reachable now: instance id -> epoch."""
        self._records: dict[str, tuple[InstanceRecord, float]] = {}

    def send(self, target: str, channel: ChannelName, message: HandoffMessage) -> None:
        if not self.broker_is_away:  # real senders keep trying for two seconds
            self.loose.append(Letter(target, channel, encode(message), self.epochs.get(target)))

    def send_tensor(self, target: str, header: TensorHeader, data: memoryview) -> None:
        self.loose.append(Letter(target, None, encode(header), self.epochs.get(target), bytes(data)))

    def damage(self, letter: Letter) -> None:
        self.loose[self.loose.index(letter)] = replace(letter, damaged=True)

    # --- the broker

    def empty_broker(self) -> None:
        """It has forgotten who is there, and every message that it had not passed on."""
        self._records.clear()
        self.loose = [letter for letter in self.loose if letter.channel is None]

    async def reach_broker(self) -> None:
        """Raises what a client raises while the broker is away, or has not answered all its repetitions."""
        try:
            async with asyncio.timeout(SILENCE_S):
                await self.broker_answers.wait()
        except TimeoutError as error:
            raise RedisTimeoutError("the broker does not answer") from error
        if self.broker_is_away:
            raise RedisConnectionError("the broker is away")

    def enter(self, record: InstanceRecord) -> None:
        self._records[record.instance_id] = record, time.monotonic() + RECORD_TTL_S

    def leave(self, instance_id: str) -> None:
        self._records.pop(instance_id, None)

    def instances(self) -> dict[str, InstanceRecord]:
        now_s = time.monotonic()
        return {name: record for name, (record, until_s) in self._records.items() if until_s > now_s}

    # --- connections

    def cut_off(self, proxy: str) -> None:
        """A proxy has died: nothing that it sends leaves, and workers see that it is gone when they send something."""
        for connection in self.connections.values():
            if connection.identity.decode().startswith(f"{proxy}@"):
                connection.closed = True
                connection.to_worker.clear()

    def connect(self, address: str, identity: str) -> Connection:
        instance_id, _, epoch = address.rpartition("/")
        connection = Connection(identity.encode(), (instance_id, int(epoch)))
        self.connections[connection.identity] = connection
        if self.epochs.get(instance_id) != int(epoch):
            connection.to_proxy.append(None)
        return connection

    def lose(self, worker: tuple[str, int]) -> None:
        """A worker has died: what it has sent still arrives, what it was sent does not."""
        for connection in self.connections.values():
            if connection.worker == worker:
                connection.to_worker.clear()
                connection.to_proxy.append(None)


class SimulatedRegistry:
    """Stands in for broker.cluster.registry.Registry."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._own: InstanceRecord | None = None

    async def register(self, record: InstanceRecord) -> None:
        self._own = record
        await self._network.reach_broker()
        self._network.enter(record)

    async def heartbeat(self, **changes: Any) -> None:
        assert self._own is not None
        for name, value in changes.items():
            self._own = msgspec.structs.replace(self._own, **{name: value})
        await self._network.reach_broker()
        self._network.enter(self._own)

    async def get(self, instance_id: str) -> InstanceRecord | None:
        return (await self.instances()).get(instance_id)

    async def instances(self) -> dict[str, InstanceRecord]:
        await self._network.reach_broker()
        return self._network.instances()

    async def find(self, ids: Iterable[str]) -> dict[str, InstanceRecord]:
        wanted = list(ids)
        found = await self.instances() if wanted else {}
        return {instance_id: found[instance_id] for instance_id in wanted if instance_id in found}

    async def changes(self) -> AsyncGenerator[None]:
        """Tells of nothing: everybody looks by himself."""
        await asyncio.Event().wait()
        yield

    async def unregister(self) -> bool:
        assert self._own is not None
        await self._network.reach_broker()
        self._network.leave(self._own.instance_id)
        return True


class SimulatedChannels:
    """Stands in for broker.handoff.channels.ChannelSender; a dead process sends nothing."""

    num_waiting = num_dropped = 0

    def __init__(self, network: Network, alive: Callable[[], bool]) -> None:
        self._network = network
        self._alive = alive

    def send(self, instance_id: str, channel: ChannelName, message: HandoffMessage) -> None:
        if self._alive():
            self._network.send(instance_id, channel, message)


class SimulatedReader:
    """Stands in for broker.handoff.channels.ChannelReader: the simulation hands over what arrives."""

    num_invalid = 0

    def __init__(self, network: Network) -> None:
        self._network = network

    async def keep_alive(self) -> None:
        await self._network.reach_broker()


class SimulatedServer:
    """Stands in for broker.cluster.rpc.WorkerServer."""

    num_invalid = 0

    def __init__(self, network: Network, worker: tuple[str, int]) -> None:
        self._network = network
        self.worker = worker
        self.address = f"{worker[0]}/{worker[1]}"
        self.received: asyncio.Queue[tuple[bytes, ToWorker]] = asyncio.Queue()

    async def receive(self) -> tuple[bytes, ToWorker]:
        return await self.received.get()

    def send(self, proxy: bytes, *messages: FromWorker | Heartbeat) -> list[Outcome]:
        connection = self._network.connections.get(proxy)
        if connection is None or connection.closed:
            return ["gone"] * len(messages)
        if self._network.epochs.get(self.worker[0]) == self.worker[1]:
            told = [decode_from_worker(encode(message)) for message in messages]
            connection.to_proxy.extend(message for message in told if not isinstance(message, Heartbeat))
        return ["sent"] * len(messages)


class SimulatedClient:
    """Stands in for broker.cluster.rpc.WorkerClient."""

    connected = True

    def __init__(self, network: Network, address: str, identity: str, life: str) -> None:
        self._connection = network.connect(address, identity)
        self.address, self.life = address, life

    def send(self, message: ToWorker) -> None:
        if not self._connection.closed:
            self._connection.to_worker.append((time.monotonic(), encode(message)))

    async def receive(self) -> FromWorker:
        return await self._connection.received.get()

    async def opened(self) -> bool:
        return True

    async def lost(self) -> None:
        await self._connection.lost.wait()

    def close(self, linger_ms: int = 0) -> None:
        self._connection.closed = True
        if not linger_ms:
            self._connection.to_worker.clear()


class SimulatedPushBuffer:
    """Stands in for `push_buffer.PushBuffer`: the tensor leaves when it is made, before the loop hears of it."""

    scheme = "simulated"

    def __init__(self, network: Network, receiver_id: str, header: TensorHeader) -> None:
        self._network, self._receiver_id, self._header = network, receiver_id, header
        self._discarded = False
        self.sent_s: float | None = None

    def send(self, data: memoryview) -> None:
        if not self._discarded:
            header = msgspec.structs.replace(self._header, checksum=checksum(data))
            self._network.send_tensor(self._receiver_id, header, data)
            self.sent_s = time.time()

    def discard(self) -> None:
        self._discarded = True


class SimulatedTensorSender:
    """Stands in for broker.transports.tensors.TensorSender."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.num_sent: Counter[str] = Counter()
        self.num_fallbacks: Counter[str] = Counter()

    def reserve_early(self, receiver: InstanceRecord, header: TensorHeader) -> SimulatedPushBuffer | None:
        known = receiver.instance_id in self._network.epochs
        return SimulatedPushBuffer(self._network, receiver.instance_id, header) if known else None

    async def send(self, receiver: InstanceRecord, header: TensorHeader, data: memoryview, timeout_s: float) -> None:
        if receiver.instance_id not in self._network.epochs:
            await asyncio.sleep(timeout_s)
            raise TriptychError("unavailable", f"{receiver.instance_id} took no tensor within {timeout_s:g} s")
        self._network.send_tensor(receiver.instance_id, await with_checksum(header, data), data)

    def keep_only(self, addresses: set[str]) -> None: ...

    def close(self) -> None: ...


class SimulatedTensorReceiver:
    """Stands in for broker.transports.tensors.TensorReceiver."""

    address = "simulated://"
    num_invalid = num_unfinished = 0

    def __init__(self) -> None:
        self.received: asyncio.Queue[ReceivedTensor] = asyncio.Queue()

    async def receive(self) -> ReceivedTensor:
        return await self.received.get()

    def close(self) -> None: ...
