"""The two ends of a tensor's way from one process's device to another's, by one transport, as workers have them."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import zmq.asyncio

from broker.cluster.lifetime import die_with_parent
from broker.cluster.redis_client import connect
from broker.transports.base import ReceivedTensor
from broker.transports.tensors import TensorReceiver, TensorSender
from common.config import Device, Transport
from common.messages import InstanceRecord, TensorHeader
from services.handoff.device_tensors import DeviceReceiveBuffers, open_cuda, payload_of
from services.handoff.receive_buffers import ReceiveBuffers

TIMEOUT_S, ENDING_S = 30.0, 2.0
MAX_BYTES = 2**30
DTYPE = "bfloat16"
"""Of every tensor."""
KEY = ("bench", 0, 1)
"""Of every tensor: nobody asks for them by it."""


@dataclass(frozen=True)
class Way:
    """Where tensors begin and end, and how they travel."""

    transport: Transport
    device: Device
    broker: str


class Ends:
    """The sending end, and a process that lands what it is sent on the device and tells when.

    Connected once and for all, as workers are, before the first tensor; see `ends`.
    """

    def __init__(self, way: Way, pipe: Connection) -> None:
        self._way, self._pipe = way, pipe
        self._runner = asyncio.Runner()
        self._connected: tuple[TensorSender, InstanceRecord] | None = None

    def wait(self) -> None:
        """Until the process has started, or for as long as one is waited for; `send_all` says what went wrong."""
        self._pipe.poll(TIMEOUT_S)

    def send_all(self, tensors: Sequence[torch.Tensor], under_way: int) -> tuple[list[float], float]:
        """Send them, so many under way at once. Seconds of each until it has landed (by the clock that both processes
        have), and of all of them together.

        Raises RuntimeError with what went wrong at either end.
        """
        return self._runner.run(self._send_all(tensors, under_way))

    def close(self) -> None:
        if self._connected is not None:
            self._runner.run(self._disconnect(self._connected[0]))
        self._runner.close()

    async def _connect(self, way: Way) -> tuple[TensorSender, InstanceRecord]:
        self._context, self._redis = zmq.asyncio.Context(), connect(way.broker)
        sender = TensorSender(self._context, transport=way.transport, redis=self._redis, cuda=open_cuda(way.device))
        address = await self._told()
        return sender, InstanceRecord("sink", "prefill_decode", 1, "", "", DTYPE, "", "", tensor_address=address)

    async def _disconnect(self, sender: TensorSender) -> None:
        sender.close()
        self._context.destroy(linger=0)
        await self._redis.aclose()

    async def _send_all(self, tensors: Sequence[torch.Tensor], under_way: int) -> tuple[list[float], float]:
        if self._connected is None:
            self._connected = await self._connect(self._way)
        sender, record = self._connected
        self._pipe.send(len(tensors))
        began_ns: dict[int, int] = {}
        landed_ns: dict[int, int] = {}
        places = asyncio.Semaphore(under_way)

        async def send(number: int, tensor: torch.Tensor) -> None:
            header = TensorHeader("bench", number, 0, "bench", 1, [tensor.numel()], DTYPE, tensor.nbytes)
            began_ns[number] = time.monotonic_ns()
            await sender.send(record, header, payload_of(tensor), TIMEOUT_S)

        async def hear() -> None:
            for _ in tensors:
                number, when_ns = await self._told()
                landed_ns[number] = when_ns
                places.release()

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(hear())
                for number, tensor in enumerate(tensors):
                    await places.acquire()
                    group.create_task(send(number, tensor))
        except* Exception as errors:
            raise RuntimeError("; ".join(f"{type(one).__name__}: {one}" for one in errors.exceptions)) from errors
        each = [(landed_ns[number] - began_ns[number]) / 1e9 for number in sorted(began_ns)]
        return each, (max(landed_ns.values()) - min(began_ns.values())) / 1e9

    async def _told(self) -> Any:
        if not await asyncio.to_thread(self._pipe.poll, TIMEOUT_S):
            raise TimeoutError(f"the receiving process has said nothing for {TIMEOUT_S:.0f} s")
        said = self._pipe.recv()
        if isinstance(said, Exception):
            raise said
        return said


@contextmanager
def ends(way: Way) -> Iterator[Ends]:
    """Both ends for the length of a `with` block, whose process may still be starting; afterwards it is gone."""
    pipe, far = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(os.getpid(), far, way), daemon=True)
    process.start()
    far.close()
    try:
        with closing(Ends(way, pipe)) as both:
            yield both
    finally:
        pipe.close()
        process.join(ENDING_S)
        process.kill()
        process.join()


def _serve(parent_pid: int, pipe: Connection, way: Way) -> None:
    """The receiving process: one `send_all` after the other until the pipe is closed."""
    die_with_parent(parent_pid)
    try:
        asyncio.run(_land_all(pipe, way))
    except* EOFError:
        pass
    except* Exception as errors:
        pipe.send(RuntimeError("; ".join(f"{type(one).__name__}: {one}" for one in errors.exceptions)))


async def _land_all(pipe: Connection, way: Way) -> None:
    context, redis, cuda = zmq.asyncio.Context(), connect(way.broker), open_cuda(way.device)
    landing = ReceiveBuffers() if cuda is None else DeviceReceiveBuffers(cuda, torch.device(way.device))
    receiver = TensorReceiver(context, max_bytes=MAX_BYTES, transport=way.transport, redis=redis, cuda=cuda)

    async def land(received: ReceivedTensor) -> None:
        header = received.header
        landed = await landing.take(KEY, received)
        received.release()
        if isinstance(landed, str):
            raise ValueError(landed)
        pipe.send((header.input_id, time.monotonic_ns()))

    pipe.send(receiver.address)
    while True:
        count: int = await asyncio.to_thread(pipe.recv)
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(land(await receiver.receive()))
