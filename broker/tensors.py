"""Tensors from one process to another, by whichever transport suits the two.

    TensorSender --- one connection per receiver, checksum ---> TensorReceiver (one address per transport)

`InstanceRecord.tensor_address` holds the receiver's addresses, separated by spaces; the sender takes the best that it
can speak (see `Transport` in common.config). dtypes are names and the payload is bytes, so bf16 travels as it is.
Nothing here knows torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

import msgspec
import zmq.asyncio
from redis.asyncio import Redis

from broker.transports.base import Connection, Receiver
from broker.transports.base import ReceivedTensor as ReceivedTensor
from broker.transports.zmq_transport import ZmqConnection, ZmqReceiver
from common.config import Transport
from common.errors import TriptychError
from common.hashing import checksum
from common.messages import InstanceRecord, Offer, TensorHeader

ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int32": 4, "uint8": 1}
"""Bytes per element of every dtype that may travel."""


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
    ) -> None:
        """Bind what has to be bound; wants a running loop. No tensor of more than `max_bytes` gets into memory."""
        self._receiver: Receiver = ZmqReceiver(context, host, max_bytes=max_bytes)
        self.address = self._receiver.address

    @property
    def num_invalid(self) -> int:
        return self._receiver.num_invalid

    async def receive(self) -> ReceivedTensor:
        """The next tensor with a valid header; call its `release` when it has been used or refused.

        Its `fault` tells where header, bytes and checksum do not agree: it must not be used then. Anything that is no
        tensor is counted and dropped.
        """
        received = await self._receiver.receive()
        fault = payload_fault(received.header, received.data.nbytes)
        if fault is None and checksum(received.data) != received.header.checksum:
            fault = "the checksum is not the one of these bytes: they were damaged on the way"
        return replace(received, fault=fault)

    def close(self) -> None:
        self._receiver.close()


class TensorSender:
    """Sends tensors to any number of receivers, each over its own connection."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        *,
        transport: Transport = "auto",
        redis: Redis | None = None,
        cluster: str = "triptych",
    ) -> None:
        self._context = context
        self._connections: dict[str, Connection] = {}

    async def send(self, receiver: InstanceRecord, header: TensorHeader, data: memoryview, timeout_s: float) -> None:
        """Hand one tensor with its checksum to the connection to `receiver`.

        `data` must not change until the receipt has come. Raises TriptychError("unavailable") where there is no
        connection, or no room in it, within `timeout_s`.
        """
        address = addresses_by_scheme(receiver.tensor_address).get("tcp")
        if address is None:
            message = f"{receiver.instance_id} takes tensors at {receiver.tensor_address!r} only"
            raise TriptychError("unavailable", message)
        connection = self._connections.get(receiver.tensor_address)
        if connection is None:
            connection = self._connections[receiver.tensor_address] = ZmqConnection(self._context, address)
        await connection.send(msgspec.structs.replace(header, checksum=checksum(data)), data, timeout_s)

    def keep_only(self, receivers: Iterable[InstanceRecord]) -> None:
        """Close the connections to all other receivers: they are gone."""
        for address in self._connections.keys() - {receiver.tensor_address for receiver in receivers}:
            self._connections.pop(address).close()

    def close(self) -> None:
        self.keep_only(())
