"""Tensors between processes, by the best transport of each pair.

    TensorSender --- one connection per receiver ---> TensorReceiver (one address per transport)

`InstanceRecord.tensor_address` holds the receiver's addresses, separated by spaces; the sender chooses the best common
transport (see `Transport` in common.config). dtypes are names and the payload is bytes: no module here knows torch.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Final

import msgspec

from broker.transports.base import Receiver
from broker.transports.factory import TransportContext, make_connectors, make_device_connectors, make_receivers
from broker.transports.payload import Payload
from broker.transports.received import PushTarget, Received
from broker.transports.received import ReceivedTensor as ReceivedTensor
from broker.transports.routes import Route
from broker.transports.routes import addresses_by_scheme as addresses_by_scheme
from broker.transports.shm.push_buffer import PushBuffer, is_worth_it
from common.messages import InstanceRecord, Offer, TensorHeader

ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int32": 4, "uint8": 1}
"""Bytes per element of every dtype that may travel."""
TURN_S: Final = 0.001
"""Longest turn on the loop, for any number of waiting tensors."""


def payload_fault(message: TensorHeader | Offer, num_bytes: int) -> str | None:
    """Return why a message contradicts itself or the `num_bytes` of its tensor; None if consistent."""
    item_bytes = ITEM_BYTES.get(message.dtype)
    if item_bytes is None:
        return f"dtype {message.dtype!r} is none of {', '.join(ITEM_BYTES)}"
    if min(message.shape, default=0) < 0:
        return f"shape {message.shape} has a negative size"
    if math.prod(filter(None, message.shape)) >= 2**62:  # torch refuses it for no bytes, too
        return f"shape {message.shape} is beyond any memory"
    expected = math.prod(message.shape) * item_bytes
    if not expected == message.size_bytes == num_bytes:
        shape = f"shape {message.shape} of {message.dtype} is {expected} bytes"
        return f"{shape}, the message says {message.size_bytes}, there are {num_bytes}"
    return None


def change_hosts(tensor_address: str, change: Callable[[str], str]) -> str:
    """Return the same addresses, with `change` applied to each address of a host and port."""
    addresses = addresses_by_scheme(tensor_address)
    return " ".join(change(a) if scheme.endswith("tcp") else a for scheme, a in addresses.items())


class TensorReceiver:
    """Receives tensors from any number of senders, by every transport of the setting."""

    def __init__(self, means: TransportContext, *, max_bytes: int, stale_s: float = 30.0) -> None:
        """Bind the addresses; wants a running loop. No tensor of more than `max_bytes` is read into memory. Over ZMQ
        and NIXL, an unfinished tensor is discarded after `stale_s` (seconds) without progress.

        Raises TriptychError("invalid_request") if NIXL is wanted, and does not start.
        """
        self._arrival = asyncio.Event()
        self._ready: deque[Receiver] = deque()  # that may have a tensor
        self._receivers = make_receivers(means, max_bytes, stale_s, self._note_arrival)
        self._ready.extend(self._receivers)
        self.address = " ".join(receiver.address for receiver in self._receivers)
        self._turn_began_s = 0.0

    @property
    def num_invalid(self) -> int:
        return sum(receiver.num_invalid for receiver in self._receivers)

    @property
    def num_unfinished(self) -> int:
        return sum(receiver.num_unfinished for receiver in self._receivers)

    async def receive(self) -> Received:
        """Return the next tensor with a valid header, its bytes unchecked; call its `release` after use or refusal.

        A transport that shares memory beforehand may return the memory first, before the tensor is computed.
        """
        if time.monotonic() - self._turn_began_s > TURN_S:
            await asyncio.sleep(0)
            self._turn_began_s = time.monotonic()
        while (received := self._pop()) is None:
            self._arrival.clear()
            await self._arrival.wait()
            self._turn_began_s = time.monotonic()
        if isinstance(received, PushTarget):
            return received
        fault = payload_fault(received.header, received.data.nbytes)
        return received if fault is None else msgspec.structs.replace(received, fault=fault)

    def _pop(self) -> Received | None:
        """Ask the transports in turn, so that no transport waits for another."""
        while self._ready:
            receiver = self._ready.popleft()
            if (received := receiver.pop()) is not None:
                self._ready.append(receiver)
                return received
        return None  # until a receiver calls `_note_arrival`

    def _note_arrival(self, receiver: Receiver) -> None:
        if receiver not in self._ready:
            self._ready.append(receiver)
        self._arrival.set()

    def close(self) -> None:
        """Receive no further tensor. Received tensors stay valid until their release."""
        for receiver in self._receivers:
            receiver.close()


class TensorSender:
    """Sends tensors to any number of receivers, each over its own connection."""

    def __init__(self, means: TransportContext) -> None:
        """Listen for answers on the host of `means`, which are this sender's own."""
        self._means = means
        self._connectors = make_connectors(means)
        self._closing = ExitStack()
        self._devices = make_device_connectors(means, self._closing)
        self._routes: dict[str, Route] = {}
        self.num_sent: Counter[str] = Counter()
        """Tensors by the scheme that carried them."""
        self.num_fallbacks: Counter[str] = Counter()
        """Tensors by each better scheme that led nowhere; as `gpu`, those brought to the host in spite of senders."""

    async def send(self, receiver: InstanceRecord, header: TensorHeader, data: Payload, timeout_s: float) -> None:
        """Send a tensor by the best connection to `receiver`; `data` must not change until the receipt has come.

        Raises TriptychError("unavailable") without a connection, or without memory there, within `timeout_s`.
        """
        route = self._routes.get(receiver.tensor_address)
        if route is None:
            route = self._routes[receiver.tensor_address] = Route(
                receiver, self._connectors, self._devices, self.num_fallbacks, only_cuda=self._means.transport == "cuda"
            )
        scheme = route.send_now(header, data) or await route.send(header, data, time.monotonic() + timeout_s)
        self.num_sent[scheme] += 1

    def reserve_early(self, receiver: InstanceRecord, header: TensorHeader) -> PushBuffer | None:
        """Return a path for another thread to send a tensor ahead of the loop, to be discarded; None without a path."""
        if not is_worth_it(header.size_bytes):
            return None
        route = self._routes.get(receiver.tensor_address)
        return None if route is None else route.reserve_early(header)

    def keep_only(self, receivers: Iterable[InstanceRecord]) -> None:
        """Close the connections to all other receivers."""
        for address in self._routes.keys() - {receiver.tensor_address for receiver in receivers}:
            self._routes.pop(address).close()

    def close(self) -> None:
        """Close all connections, for good."""
        self.keep_only(())
        self._connectors = {}
        self._closing.close()
        self._means.nixl_agent.close()
