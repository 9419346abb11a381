"""Tensors from one process to another, by whichever transport suits the two.

    TensorSender --- one connection per receiver ---> TensorReceiver (one address per transport)

`InstanceRecord.tensor_address` holds the receiver's addresses, separated by spaces; the sender takes the best that it
can speak (see `Transport` in common.config). dtypes are names and the payload is bytes, so bf16 travels as it is.
Nothing here knows torch.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Final

import zmq.asyncio
from redis.asyncio import Redis

from broker.transports.base import Connection, Sent, Unreachable
from broker.transports.base import ReceivedTensor as ReceivedTensor
from broker.transports.choice import Connector, Means, make_connectors, make_cuda_sender, make_receivers
from broker.transports.cuda_runtime import CudaRuntime
from broker.transports.cuda_transport import CudaConnection, CudaSender
from broker.transports.payload import DeviceBuffer, Payload
from common.config import Transport
from common.errors import TriptychError
from common.messages import InstanceRecord, Offer, TensorHeader
from common.telemetry import get_logger

ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int32": 4, "uint8": 1}
"""Bytes per element of every dtype that may travel."""
TURN_S: Final = 0.001
"""After so long others have their turn on the loop, however many tensors wait."""
AVOID_S: Final = 10.0
"""A transport that cannot reach a receiver is not tried again for so long, if there is another."""

log = get_logger()


def payload_fault(message: TensorHeader | Offer, num_bytes: int) -> str | None:
    """Why what a message says of a tensor does not fit `num_bytes` of it, or itself; None if it does."""
    item_bytes = ITEM_BYTES.get(message.dtype)
    if item_bytes is None:
        return f"dtype {message.dtype!r} is none of {', '.join(ITEM_BYTES)}"
    if min(message.shape, default=0) < 0:
        return f"shape {message.shape} has a negative size"
    expected = math.prod(message.shape) * item_bytes
    if not expected == message.size_bytes == num_bytes:
        shape = f"shape {message.shape} of {message.dtype} is {expected} bytes"
        return f"{shape}, the message says {message.size_bytes}, there are {num_bytes}"
    return None


def addresses_by_scheme(tensor_address: str) -> dict[str, str]:
    """The addresses of an InstanceRecord: {"tcp": "tcp://host:port", ...}, in the receiver's order."""
    return {address.partition("://")[0]: address for address in tensor_address.split()}


def change_hosts(tensor_address: str, change: Callable[[str], str]) -> str:
    """The same addresses after `change` of each that names a host and a port."""
    addresses = addresses_by_scheme(tensor_address)
    return " ".join(change(a) if scheme.endswith("tcp") else a for scheme, a in addresses.items())


class TensorReceiver:
    """Takes tensors from any number of senders, by every transport that `transport` stands for."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        host: str = "127.0.0.1",
        *,
        max_bytes: int,
        transport: Transport = "auto",
        redis: Redis | None = None,
        cluster: str = "triptych",
        cuda: CudaRuntime | None = None,
    ) -> None:
        """Bind what has to be bound; wants a running loop. No tensor of more than `max_bytes` gets into memory.

        Raises TriptychError("invalid_request") where this host does not have the transport.
        """
        self._arrival = asyncio.Event()
        means = Means(context, host, redis, cluster, cuda)
        self._receivers = deque(make_receivers(means, transport, max_bytes, self._arrival.set))
        self.address = " ".join(receiver.address for receiver in self._receivers)
        self._turn_began_s = 0.0

    @property
    def num_invalid(self) -> int:
        return sum(receiver.num_invalid for receiver in self._receivers)

    async def receive(self) -> ReceivedTensor:
        """The next tensor with a valid header; call its `release` when it has been used or refused.

        Nobody has looked at its bytes yet: see `ReceivedTensor`. Anything that is no tensor is counted and dropped.
        What waits to be received waits in the transports.
        """
        if time.monotonic() - self._turn_began_s > TURN_S:
            await self._pause(asyncio.sleep(0))
        while True:
            self._arrival.clear()
            received = self._take()
            if received is not None:
                return replace(received, fault=payload_fault(received.header, received.data.nbytes))
            await self._pause(self._arrival.wait())

    def _take(self) -> ReceivedTensor | None:
        """From the transports in turn, so that none of them is kept waiting by another."""
        for _ in range(len(self._receivers)):
            received = self._receivers[0].take()
            self._receivers.rotate(-1)
            if received is not None:
                return received
        return None

    async def _pause(self, awaited: Awaitable[object]) -> None:
        await awaited
        self._turn_began_s = time.monotonic()

    def close(self) -> None:
        """Take nothing more. What has been received stays valid until it is released."""
        for receiver in self._receivers:
            receiver.close()


class TensorSender:
    """Sends tensors to any number of receivers, each over its own connection."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        host: str = "127.0.0.1",
        *,
        transport: Transport = "auto",
        redis: Redis | None = None,
        cluster: str = "triptych",
        cuda: CudaRuntime | None = None,
    ) -> None:
        """What listens for answers does so on `host`. Raises TriptychError("invalid_request") where this host does not
        have the transport."""
        means = Means(context, host, redis, cluster, cuda)
        self._connectors = make_connectors(means, transport)
        self._cuda = make_cuda_sender(means, transport)
        self._only_cuda = transport == "cuda"
        self._routes: dict[str, _Route] = {}
        self.num_sent: Counter[str] = Counter()
        """Tensors by the scheme that took them."""

    async def send(self, receiver: InstanceRecord, header: TensorHeader, data: Payload, timeout_s: float) -> None:
        """Hand one tensor to the best connection to `receiver`, which adds its checksum to the header.

        What lies on a GPU goes by CUDA where that leads there, else its bytes are brought to the host. `data` must not
        change until the receipt has come. Raises TriptychError("unavailable") where there is no connection, or no room
        in it, within `timeout_s`.
        """
        route = self._routes.get(receiver.tensor_address)
        if route is None:
            route = _Route(receiver, self._connectors, self._cuda, only_cuda=self._only_cuda)
            self._routes[receiver.tensor_address] = route
        deadline_s = time.monotonic() + timeout_s
        scheme = await route.send(header, data, deadline_s)
        self.num_sent[scheme] += 1

    def keep_only(self, receivers: Iterable[InstanceRecord]) -> None:
        """Close the connections to all other receivers: they are gone."""
        for address in self._routes.keys() - {receiver.tensor_address for receiver in receivers}:
            self._routes.pop(address).close()

    def close(self) -> None:
        """Close all connections, for good."""
        self.keep_only(())
        self._connectors = {}
        if self._cuda is not None:
            self._cuda.close()


class _Route:
    """The ways to one receiver, the best first; connections are made when they are first used, and kept."""

    def __init__(
        self, receiver: InstanceRecord, connectors: dict[str, Connector], cuda: CudaSender | None, *, only_cuda: bool
    ) -> None:
        """With `only_cuda`, what lies on a GPU takes no other way.

        Raises TriptychError("unavailable") where no transport is common to both.
        """
        offered = addresses_by_scheme(receiver.tensor_address)
        self._receiver_id = receiver.instance_id
        self._makers = {name: partial(make, offered[name]) for name, make in connectors.items() if name in offered}
        self._connections: dict[str, Connection[memoryview]] = {}
        self._cuda: CudaConnection | None = None
        if cuda is not None and cuda.scheme in offered:
            self._cuda = cuda.connect(offered[cuda.scheme])
        self._only_cuda = only_cuda
        self._avoided_until_s: dict[str, float] = {}
        self._closed = False
        if not self._makers and self._cuda is None:
            message = f"{receiver.instance_id} takes tensors by {_list(offered)}, this instance sends by "
            raise TriptychError("unavailable", message + f"{_list(connectors)}: start both with the same --transport")

    async def send(self, header: TensorHeader, data: Payload, deadline_s: float) -> str:
        """Send by the first way that leads there; returns its scheme."""
        reasons: list[str] = []
        if isinstance(data, DeviceBuffer):
            if await self._sent_by_cuda(header, data, deadline_s, reasons):
                return CudaConnection.scheme
            data = await self._brought_to_host(data, deadline_s)
        for connection in self._usable():
            if await self._sent_by(connection, header, data, deadline_s, reasons):
                return connection.scheme
        raise TriptychError("unavailable", f"no way to {self._receiver_id}: {'; '.join(reasons)}")

    def close(self) -> None:
        self._closed = True
        for connection in self._connections.values():
            connection.close()
        if self._cuda is not None:
            self._cuda.close()

    async def _sent_by_cuda(
        self, header: TensorHeader, data: DeviceBuffer, deadline_s: float, reasons: list[str]
    ) -> bool:
        way = self._cuda
        if way is None:
            reasons.append("it takes nothing by cuda")
        elif not way.carries(data.nbytes):
            reasons.append(f"{data.nbytes} bytes are too many for cuda")
        elif self._is_avoided(way.scheme) and not self._only_cuda:
            return False
        elif await self._sent_by(way, header, data, deadline_s, reasons):
            return True
        if self._only_cuda:
            raise TriptychError("unavailable", f"no way to {self._receiver_id}: {'; '.join(reasons)}")
        return False

    async def _brought_to_host(self, data: DeviceBuffer, deadline_s: float) -> memoryview:
        try:
            async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
                return await asyncio.to_thread(data.to_host)
        except TimeoutError as error:
            message = f"{data.nbytes} bytes did not come from the GPU in time to be sent to {self._receiver_id}"
            raise TriptychError("unavailable", message) from error

    def _usable(self) -> Iterator[Connection[memoryview]]:
        """All but those that have lately led nowhere; the last one in any case.

        Raises TriptychError("unavailable") once the route is closed: what were made now would be nobody's to close.
        """
        for number, (scheme, make) in enumerate(self._makers.items(), 1):
            if self._closed:
                raise TriptychError("unavailable", f"{self._receiver_id} has gone")
            if number == len(self._makers) or not self._is_avoided(scheme):
                if scheme not in self._connections:
                    self._connections[scheme] = make()
                yield self._connections[scheme]

    def _is_avoided(self, scheme: str) -> bool:
        return self._avoided_until_s.get(scheme, 0.0) > time.monotonic()

    async def _sent_by(
        self, connection: Connection[Sent], header: TensorHeader, data: Sent, deadline_s: float, reasons: list[str]
    ) -> bool:
        """False, and why, where this way does not lead there."""
        try:
            await connection.send(header, data, max(0.0, deadline_s - time.monotonic()))
            return True
        except Unreachable as error:
            reasons.append(error.info.message)
            self._avoided_until_s[connection.scheme] = time.monotonic() + AVOID_S
            log.info("another transport is tried", receiver=self._receiver_id, why=error.info.message)
            return False
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and task is not None and not task.cancelling():  # ZMQ ends pending calls like this
                raise TriptychError("unavailable", f"{self._receiver_id} has gone") from None
            raise


def _list(schemes: Iterable[str]) -> str:
    return ", ".join(schemes) or "no transport"
