"""Senders and receivers of every transport for tests, which give them bytes of the host and look at such.

For `cuda`, and for NIXL between GPUs, each gets a fake GPU of its own, as each process has its own view of one: what is
sent lies there, and what is received is copied from there.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Literal, TypeAlias

import msgspec
import zmq.asyncio
from redis.asyncio import Redis

from broker.transports.factory import TransportContext
from broker.transports.payload import DeviceBuffer, Payload
from broker.transports.tensors import ReceivedTensor, TensorReceiver, TensorSender, addresses_by_scheme
from common.config import Transport
from common.hashing import checksum
from common.messages import InstanceRecord, TensorHeader
from tests.broker.transports.fake_cuda import FakeCuda

Way: TypeAlias = Transport | Literal["nixl+cuda"]
"""A setting, or NIXL for what lies on a GPU."""
DEVICE_SCHEMES = {"cuda": "cuda+unix", "nixl+cuda": "nixl+cuda+tcp"}


def make_receiver(context: zmq.asyncio.Context, transport: Way, redis: Redis | None, max_bytes: int) -> TensorReceiver:
    if transport == "cuda" or transport == "nixl+cuda":
        return DeviceReceiver(context, FakeCuda(), max_bytes, transport)
    return TensorReceiver(TransportContext(context, transport=transport, redis=redis), max_bytes=max_bytes)


def make_sender(context: zmq.asyncio.Context, transport: Way, redis: Redis | None) -> TensorSender:
    if transport == "cuda" or transport == "nixl+cuda":
        return DeviceSender(context, FakeCuda(), transport)
    return TensorSender(TransportContext(context, transport=transport, redis=redis))


class DeviceSender(TensorSender):
    """Sends what lies on a GPU."""

    def __init__(self, context: zmq.asyncio.Context, fake: FakeCuda, way: Literal["cuda", "nixl+cuda"]) -> None:
        super().__init__(TransportContext(context, transport=_setting_of(way), cuda=fake))
        self._fake = fake

    async def send(self, receiver: InstanceRecord, header: TensorHeader, data: Payload, timeout_s: float) -> None:
        assert isinstance(data, memoryview)
        await super().send(receiver, header, self._fake.upload(data), timeout_s)


class DeviceReceiver(TensorReceiver):
    """Takes what lies on a GPU, by one way alone, and copies it to the host at once; its room goes back with the
    release all the same."""

    def __init__(
        self, context: zmq.asyncio.Context, fake: FakeCuda, max_bytes: int, way: Literal["cuda", "nixl+cuda"]
    ) -> None:
        super().__init__(TransportContext(context, transport=_setting_of(way), cuda=fake), max_bytes=max_bytes)
        self.address = addresses_by_scheme(self.address)[DEVICE_SCHEMES[way]]
        self._fake = fake

    async def receive(self) -> ReceivedTensor:
        received = await super().receive()
        buffer = received.data
        assert isinstance(buffer, DeviceBuffer)
        assert received.header.checksum == 0
        data = self._copied(buffer)
        header = msgspec.structs.replace(received.header, checksum=checksum(data))
        return msgspec.structs.replace(received, header=header, data=data, _release=partial(_release, buffer, received))

    def _copied(self, buffer: DeviceBuffer) -> memoryview:
        host, stream = bytearray(buffer.nbytes), self._fake.make_stream()
        if host:
            address = ctypes.addressof(ctypes.c_char.from_buffer(host))
            self._fake.copy(address, buffer.pointer, buffer.nbytes, stream)
        self._fake.synchronize(stream)
        self._fake.destroy_stream(stream)
        return memoryview(host)


def _setting_of(way: Literal["cuda", "nixl+cuda"]) -> Transport:
    return "cuda" if way == "cuda" else "nixl"


def _release(buffer: DeviceBuffer, received: ReceivedTensor) -> None:
    """Keeps the buffer until then."""
    received.release()
