"""What the tests of transports share: ends of one kind, real peers, senders that say anything, and counts of what a
process holds."""

from __future__ import annotations

import asyncio
import gc
import os
import platform
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq.asyncio
from redis.asyncio import Redis

from broker.transports.base import Connection
from broker.transports.factory import TransportContext, make_connectors
from broker.transports.linked import packets
from broker.transports.linked.wire import NONCE_BYTES
from broker.transports.nixl.agent import module_name
from broker.transports.payload import ChunkedBytes, Payload
from broker.transports.received import PushTarget
from broker.transports.shm import segment
from broker.transports.shm.wire import Hello
from broker.transports.tensors import ReceivedTensor, TensorReceiver, TensorSender
from common.messages import InstanceRecord, TensorHeader, encode
from tests.broker.conftest import make_record
from tests.broker.transports.device_ends import DEVICE_SCHEMES, Way, make_receiver, make_sender
from tests.eventually import eventually

ROOT = Path(__file__).resolve().parents[3]
NIXL_REQUIRED = os.environ.get("CI") == "true" and (sys.platform, platform.machine()) == ("linux", "x86_64")
"""There it belongs to what tests need: without it they fail."""
NEEDS_NIXL = pytest.mark.skipif(
    module_name() is None and not NIXL_REQUIRED, reason="NIXL is not installed: pip install '.[nixl]'"
)
NIXL = pytest.param("nixl", marks=NEEDS_NIXL)
NIXL_CUDA = pytest.param("nixl+cuda", marks=NEEDS_NIXL)
"""Between GPUs: what stands for them is memory that the real library moves."""


def to(address: str) -> InstanceRecord:
    return make_record("d0", "prefill_decode", tensor_address=address)


def header(shape: list[int], dtype: str, size_bytes: int, **more: Any) -> TensorHeader:
    return msgspec.structs.replace(TensorHeader("r", 0, 0, "e0", 1, shape, dtype, size_bytes), **more)


def of_bytes(data: bytes | memoryview, **more: Any) -> TensorHeader:
    """The header of these bytes; the connection adds their checksum."""
    return header([len(data)], "uint8", len(data), **more)


@dataclass
class Kit:
    """Makes ends of one transport, and closes them at the end of a test."""

    transport: Way
    redis: Redis
    broker_url: str
    context: zmq.asyncio.Context = field(default_factory=zmq.asyncio.Context)
    _ends: list[TensorReceiver | TensorSender | Connection] = field(default_factory=list)
    _peers: list[Peer] = field(default_factory=list)

    def receiver(self, max_bytes: int = 2**28) -> TensorReceiver:
        receiver = make_receiver(self.context, self.transport, self.redis, max_bytes)
        self._ends.append(receiver)
        return receiver

    def sender(self) -> TensorSender:
        sender = make_sender(self.context, self.transport, self.redis)
        self._ends.append(sender)
        return sender

    def raw(self, receiver: TensorReceiver) -> zmq.asyncio.Socket:
        """A socket that is connected to a receiver over TCP and says whatever it likes."""
        raw = self.context.socket(zmq.DEALER)
        raw.connect(receiver.address[receiver.address.index("tcp:") :])
        return raw

    def connection(self, address: str) -> Connection:
        """The bare connection below the facade."""
        assert self.transport != "nixl+cuda"
        (make,) = make_connectors(TransportContext(self.context, transport=self.transport, redis=self.redis)).values()
        self._ends.append(connection := make(address))
        return connection

    async def peer(self, mode: str, *args: str) -> Peer:
        """A process of tests.broker.transports.transport_peer."""
        command = [
            sys.executable,
            "-m",
            "tests.broker.transports.transport_peer",
            mode,
            self.transport,
            self.broker_url,
            *args,
        ]
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, cwd=ROOT)
        self._peers.append(peer := Peer(process))
        return peer

    async def warm_up(self) -> None:
        """One tensor there and back: whatever a process opens once and keeps is open from now on."""
        sender, receiver = self.sender(), self.receiver()
        await transfer(sender, receiver, of_bytes(bytes(2**16)), memoryview(bytes(2**16)))
        sender.close()
        receiver.close()

    @property
    def on_device(self) -> bool:
        """Whether tensors go from one GPU to another."""
        return self.transport in DEVICE_SCHEMES

    async def close(self) -> None:
        for peer in self._peers:
            await peer.kill()
        for end in self._ends:
            end.close()
        await asyncio.sleep(0)  # cancelled tasks end
        self.context.destroy(linger=0)


@dataclass
class Peer:
    process: asyncio.subprocess.Process

    async def line(self) -> str:
        assert self.process.stdout is not None
        async with asyncio.timeout(20):
            return (await self.process.stdout.readline()).decode().strip()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def kill(self) -> None:
        """SIGKILL, and its end."""
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


async def transfer(
    sender: TensorSender, receiver: TensorReceiver, head: TensorHeader, data: Payload, timeout_s: float = 30
) -> ReceivedTensor:
    """Send one tensor, receive it and look at its bytes."""
    async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
        group.create_task(sender.send(to(receiver.address), head, data, timeout_s))
        receiving = group.create_task(receive(receiver))
    return receiving.result()


async def next_tensor(receiver: TensorReceiver) -> ReceivedTensor:
    """The next tensor as it has come, past the memory that was given for tensors."""
    while isinstance(received := await receiver.receive(), PushTarget):
        pass
    return received


async def next_target(receiver: TensorReceiver) -> PushTarget:
    """Memory for a tensor to come, which is what comes next."""
    received = await receiver.receive()
    assert isinstance(received, PushTarget)
    return received


async def receive(receiver: TensorReceiver) -> ReceivedTensor:
    """The next tensor, its bytes in one piece; its `fault` says what a pass over them has found, too."""
    received = await next_tensor(receiver)
    fault = await received.verify()
    data = received.data
    return msgspec.structs.replace(
        received, fault=fault, data=data.joined() if isinstance(data, ChunkedBytes) else data
    )


async def still_works(kit: Kit, receiver: TensorReceiver) -> None:
    """An honest sender's tensor still comes."""
    data = memoryview(os.urandom(1000))
    received = await transfer(kit.sender(), receiver, of_bytes(data), data)
    assert (received.data, received.fault) == (data, None)


def fd_of(data: bytes, *, size: int | None = None) -> int:
    """A descriptor of shared memory as a sender makes it."""
    fd, memory = segment.create(size or len(data))
    memory[: len(data)] = list(data)
    return fd


class RawSender:
    """A sender over shared memory that says whatever it likes."""

    def __init__(self, receiver: TensorReceiver) -> None:
        self.packets: list[bytes] = []
        self.ended = False
        name = receiver.address.rpartition("/")[2]
        self.socket = packets.PacketSocket(packets.connect(name), self._take, self._end)

    def _take(self, packet: memoryview, fds: list[int]) -> None:
        self.packets.append(bytes(packet))

    def _end(self, error: Exception | None) -> None:
        self.ended = True

    async def greet(self) -> RawSender:
        fd = fd_of(bytes(NONCE_BYTES), size=2**20)
        assert self.socket.try_send(encode(Hello(2**20)), [fd])
        os.close(fd)
        await eventually(lambda: len(self.packets) == 1)
        return self

    async def is_dropped_after(self, packet: bytes, *fds: int) -> None:
        assert self.socket.try_send(packet, list(fds))
        packets.close_all(fds)
        await eventually(lambda: self.ended)


async def keys_without_expiry(redis: Redis) -> list[bytes]:
    return [key for key in await redis.keys("*") if await redis.pttl(key) == -1]


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def listening_addresses() -> list[IPv4Address | IPv6Address]:
    """Where this process takes TCP connections."""
    own, addresses = sockets(), []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if f"socket:[{inode}]" in own and state == "0A":
                addresses.append(_address_of(local.partition(":")[0]))
    return addresses


def sockets() -> set[str]:
    """All sockets of this process, by their inode."""
    return {link for fd in os.listdir("/proc/self/fd") if (link := _link_of(fd)).startswith("socket:")}


def _link_of(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:  # closed meanwhile, as the one that lists them
        return ""


def _address_of(digits: str) -> IPv4Address | IPv6Address:
    """From the kernel's notation: hexadecimal digits of words in the processor's byte order."""
    words = [int(digits[start : start + 8], 16) for start in range(0, len(digits), 8)]
    return ip_address(b"".join(word.to_bytes(4, sys.byteorder) for word in words))


def shared_files() -> set[str]:
    """Files in shared memory that could be ours; other programs have theirs there, too."""
    return {name for name in os.listdir("/dev/shm") if "triptych" in name or "ucx" in name}


@asynccontextmanager
async def kit_of(transport: Way, redis: Redis, broker_url: str) -> AsyncIterator[Kit]:
    kit = Kit(transport, redis, broker_url)
    try:
        yield kit
    finally:
        await kit.close()
