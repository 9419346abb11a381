"""The two ends of every route of a tensor that tools.bench.transports compares, and the process of the receiving ones.

Each end runs through broker.transports.tensors, with checksums made and verified: where the bytes have arrived, as
for keys and values, or while they are copied to where they will stay, as for the output of an encoder (COPIED). Beside
them a loop of plain pyzmq, which does none of this.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Final, cast

import numpy as np
import zmq
import zmq.asyncio
from msgspec.msgpack import decode

from broker.cluster.redis_client import connect
from broker.transports.cuda.receiver import SCHEME as CUDA_SCHEME
from broker.transports.cuda.runtime import CudaError, CudaRuntime
from broker.transports.factory import TransportContext
from broker.transports.nixl.agent import module_name
from broker.transports.nixl.memory import CUDA_SCHEME as NIXL_CUDA_SCHEME
from broker.transports.payload import DeviceBuffer
from broker.transports.tensors import ReceivedTensor, TensorReceiver, TensorSender, addresses_by_scheme
from common.config import Transport
from common.messages import InstanceRecord, TensorHeader, encode
from common.process import malloc
from common.process.lifetime import die_with_parent

PLAIN_ZMQ = "plain pyzmq"
"""A loop with `copy=False` on either side, the fastest that it has."""
COPIED = " + copy"
"""Ends the name of a route whose tensors are copied by the receiver."""
NIXL_CUDA = "nixl+cuda"
"""NIXL from GPU to GPU, past the host; `nixl` is that of what lies on the host."""
BETWEEN_GPUS: Final[dict[str, tuple[Transport, str]]] = {
    "cuda" + COPIED: ("cuda", CUDA_SCHEME),
    NIXL_CUDA + COPIED: ("nixl", NIXL_CUDA_SCHEME),
}
"""Routes from GPU to GPU: the setting, and the scheme of the receiver's address."""
NUM_TARGETS = 4
"""Copies go to so many places in turn, so that they are not always in the processor's cache."""
MAX_BYTES = 2**30
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Job:
    """Tensors for the receiving process: `count` of one route; with `answer`, each is answered at once."""

    route: str
    count: int
    answer: bool


class TensorSink:
    """A receiving end by a transport: `receive` waits for one tensor, checks or copies it, and releases it."""

    def __init__(self, transport: Transport, broker: str, *, copies: bool) -> None:
        self._receiver = TensorReceiver(
            TransportContext(zmq.asyncio.Context(), transport=transport, redis=connect(broker)), max_bytes=MAX_BYTES
        )
        self.address = self._receiver.address
        self._targets = [bytearray() for _ in range(NUM_TARGETS)] if copies else []

    async def receive(self) -> TensorHeader:
        received = cast(ReceivedTensor, await self._receiver.receive())  # no source pushes memory
        fault = await (received.copy_into(self._target(received.data.nbytes)) if self._targets else received.verify())
        if fault is not None:
            raise ValueError(fault)
        received.release()
        return received.header

    def _target(self, num_bytes: int) -> memoryview:
        target = self._targets.pop(0)
        if len(target) < num_bytes:
            target = bytearray(num_bytes)
        self._targets.append(target)
        return memoryview(target)[:num_bytes]


class TensorSource:
    """A sending end by a transport, connected to one sink."""

    def __init__(self, transport: Transport, address: str, broker: str = "", cuda: CudaRuntime | None = None) -> None:
        self._context, redis = zmq.asyncio.Context(), connect(broker) if broker else None
        self._sender = TensorSender(TransportContext(self._context, transport=transport, redis=redis, cuda=cuda))
        self._record = InstanceRecord("sink", "prefill_decode", 1, "", "", "uint8", "", "", tensor_address=address)

    async def send(self, header: TensorHeader, data: memoryview | DeviceBuffer) -> None:
        await self._sender.send(self._record, header, data, TIMEOUT_S)

    def close(self) -> None:
        self._sender.close()
        self._context.destroy(linger=0)


class CudaSink:
    """Copies a tensor to memory of its own on the device, as a worker does. It accepts nothing through the host."""

    def __init__(self, transport: Transport, scheme: str) -> None:
        self._cuda = CudaRuntime()
        context = zmq.asyncio.Context()
        self._receiver = TensorReceiver(
            TransportContext(context, transport=transport, cuda=self._cuda), max_bytes=MAX_BYTES
        )
        self.address = addresses_by_scheme(self._receiver.address)[scheme]
        self._stream = self._cuda.make_stream()
        self._target, self._target_bytes = 0, 0

    async def receive(self) -> TensorHeader:
        received = cast(ReceivedTensor, await self._receiver.receive())  # no source pushes memory
        if received.fault is not None or not isinstance(received.data, DeviceBuffer):
            raise ValueError(received.fault or "came through the host")
        await asyncio.to_thread(self._copy, received.data)
        received.release()
        return received.header

    def _copy(self, data: DeviceBuffer) -> None:
        if data.nbytes > self._target_bytes:
            if self._target_bytes:
                self._cuda.free(self._target)
            self._target, self._target_bytes = self._cuda.allocate(data.nbytes), data.nbytes
        self._cuda.copy(self._target, data.pointer, data.nbytes, self._stream)
        self._cuda.synchronize(self._stream)


class CudaSource(TensorSource):
    """Brings every buffer to the device when it is first sent, which is before anything is measured."""

    def __init__(self, transport: Transport, address: str) -> None:
        self._cuda = CudaRuntime()
        super().__init__(transport, address, cuda=self._cuda)
        self._stream = self._cuda.make_stream()
        self._uploaded: dict[tuple[int, int], DeviceBuffer] = {}

    async def send(self, header: TensorHeader, data: memoryview | DeviceBuffer) -> None:
        address = int(np.frombuffer(cast(memoryview, data), np.uint8).ctypes.data)
        key = address, data.nbytes
        if key not in self._uploaded:
            pointer = self._cuda.allocate(data.nbytes)
            self._cuda.copy(pointer, address, data.nbytes, self._stream)
            self._cuda.synchronize(self._stream)
            self._uploaded[key] = DeviceBuffer(pointer, data.nbytes)
        await super().send(header, self._uploaded[key])


class PlainZmqSink:
    def __init__(self) -> None:
        self._socket = zmq.Context().socket(zmq.ROUTER)
        self._socket.bind("tcp://127.0.0.1:*")
        self.address = str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))

    async def receive(self) -> TensorHeader:
        return decode(self._socket.recv_multipart(copy=False)[1].buffer, type=TensorHeader)


class PlainZmqSource:
    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(address)

    async def send(self, header: TensorHeader, data: memoryview) -> None:
        self._socket.send_multipart([encode(header), data], copy=False)

    def close(self) -> None:
        self._context.destroy(linger=0)


Sink = TensorSink | CudaSink | PlainZmqSink
Source = TensorSource | PlainZmqSource


def missing_routes() -> set[str]:
    """Return the routes whose library or device is not here."""
    missing: set[str] = set()
    if module_name() is None:
        missing |= {"nixl", NIXL_CUDA + COPIED}
    try:
        CudaRuntime()
    except CudaError:
        missing |= BETWEEN_GPUS.keys()
    return missing


def make_sink(route: str, broker: str) -> Sink:
    if route == PLAIN_ZMQ:
        return PlainZmqSink()
    if route in BETWEEN_GPUS:
        return CudaSink(*BETWEEN_GPUS[route])
    return TensorSink(cast(Transport, route.removesuffix(COPIED)), broker, copies=route.endswith(COPIED))


def make_source(route: str, broker: str, address: str) -> Source:
    if route == PLAIN_ZMQ:
        return PlainZmqSource(address)
    if route in BETWEEN_GPUS:
        return CudaSource(BETWEEN_GPUS[route][0], address)
    return TensorSource(cast(Transport, route.removesuffix(COPIED)), address, broker)


def serve_sinks(parent_pid: int, pipe: Connection, routes: Sequence[str], broker: str) -> None:
    """Run the receiving process: send its addresses, then do one Job after the other until the pipe is closed.

    For the loop of plain pyzmq malloc stays as it is.
    """
    die_with_parent(parent_pid)
    if PLAIN_ZMQ not in routes:
        malloc.use_one_arena()
        malloc.reuse_large_blocks()
    asyncio.run(_serve(pipe, routes, broker))


async def _serve(pipe: Connection, routes: Sequence[str], broker: str) -> None:
    sinks = {route: make_sink(route, broker) for route in routes}
    pipe.send({route: sink.address for route, sink in sinks.items()})
    while True:
        try:
            job: Job = await asyncio.to_thread(pipe.recv)
        except EOFError:
            return
        arrivals_ns = []  # by the clock that both processes have
        for _ in range(job.count):
            await sinks[job.route].receive()
            arrivals_ns.append(time.monotonic_ns())
            if job.answer:
                pipe.send_bytes(b"")
        pipe.send(arrivals_ns)
