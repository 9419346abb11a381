"""Routes from one process to a receiver's tensors, and the choice between them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Final

from broker.transports.base import Connection, Sent, Unreachable
from broker.transports.factory import Connector, DeviceConnection, DeviceConnector
from broker.transports.payload import DeviceBuffer, Payload
from broker.transports.shm.push_buffer import PushBuffer
from broker.transports.shm.sender import ShmConnection
from common.errors import TriptychError
from common.messages import InstanceRecord, TensorHeader
from common.telemetry import get_logger

AVOID_S: Final = 10.0
"""After a failure to reach a receiver, a transport is avoided for so long, if there is another."""
FROM_DEVICE: Final = "gpu"
"""Counted with the skipped schemes: a tensor on a GPU was brought to the host."""

log = get_logger()


def addresses_by_scheme(tensor_address: str) -> dict[str, str]:
    """The addresses of an InstanceRecord: {"tcp": "tcp://host:port", ...}, in the receiver's order."""
    return {address.partition("://")[0]: address for address in tensor_address.split()}


class Route:
    """Connections to a receiver, the best transport first, each made with its first use."""

    def __init__(
        self,
        receiver: InstanceRecord,
        connectors: dict[str, Connector],
        devices: dict[str, DeviceConnector],
        num_fallbacks: Counter[str],
        *,
        only_cuda: bool,
    ) -> None:
        """Count skipped transports in `num_fallbacks`. With `only_cuda`, tensors on a GPU go by CUDA alone.

        Raises TriptychError("unavailable") where no transport is common to both.
        """
        offered = addresses_by_scheme(receiver.tensor_address)
        self._receiver_id = receiver.instance_id
        self._makers = {name: partial(make, offered[name]) for name, make in connectors.items() if name in offered}
        self._best_scheme = next(iter(self._makers), "")
        self._connections: dict[str, Connection[memoryview]] = {}
        self._devices: list[DeviceConnection] = [
            make(offered[name]) for name, make in devices.items() if name in offered
        ]
        self._only_cuda = only_cuda
        self._num_fallbacks = num_fallbacks
        self._sends_from_device = bool(devices)
        self._avoided_until_s: dict[str, float] = {}
        self._closed = False
        if not self._makers and not self._devices:
            theirs, ours = (", ".join(schemes) or "no transport" for schemes in (offered, connectors))
            message = f"{receiver.instance_id} takes tensors by {theirs}, this instance sends by {ours}"
            raise TriptychError("unavailable", f"{message}: start both with the same --transport")

    async def send(self, header: TensorHeader, data: Payload, deadline_s: float) -> str:
        """Send by the first transport that reaches the receiver; return its scheme."""
        passed_over: dict[str, str] = {}
        scheme = await self._sent(header, data, deadline_s, passed_over)
        self._num_fallbacks.update(passed_over.keys())
        return scheme

    def send_now(self, header: TensorHeader, data: Payload) -> str | None:
        """Send by the best transport without waiting and return its scheme; None if sending would wait."""
        best = self._connections.get(self._best_scheme)
        if isinstance(best, ShmConnection) and isinstance(data, memoryview) and best.send_now(header, data):
            return best.scheme
        return None

    def reserve_early(self, header: TensorHeader) -> PushBuffer | None:
        """Reserve memory at the receiver over the best connection, for shared memory in use only."""
        best = None if self._devices else self._connections.get(self._best_scheme)
        return best.reserve_early(header) if isinstance(best, ShmConnection) else None

    def close(self) -> None:
        self._closed = True
        for connection in (*self._connections.values(), *self._devices):
            connection.close()

    async def _sent(self, header: TensorHeader, data: Payload, deadline_s: float, passed_over: dict[str, str]) -> str:
        """Return the scheme that carried the tensor. `passed_over` collects the better schemes, with reasons."""
        if isinstance(data, DeviceBuffer):
            if (scheme := await self._sent_from_device(header, data, deadline_s, passed_over)) is not None:
                return scheme
            data = await self._brought_to_host(data, deadline_s)
            if self._sends_from_device:
                passed_over[FROM_DEVICE] = "it was brought to the host"
        for connection in self._usable(passed_over):
            if await self._sent_by(connection, header, data, deadline_s, passed_over):
                return connection.scheme
        raise TriptychError("unavailable", f"no way to {self._receiver_id}: {'; '.join(passed_over.values())}")

    async def _sent_from_device(
        self, header: TensorHeader, data: DeviceBuffer, deadline_s: float, passed_over: dict[str, str]
    ) -> str | None:
        """Return the scheme that carried the tensor past the host; None if no transport can."""
        for way in self._devices:
            if not way.carries(data.nbytes):
                passed_over[way.scheme] = f"{way.scheme} does not take its {data.nbytes} bytes"
            elif self._is_avoided(way.scheme) and not self._only_cuda:
                passed_over[way.scheme] = _avoided(way.scheme)
            elif await self._sent_by(way, header, data, deadline_s, passed_over):
                return way.scheme
        if self._only_cuda:
            why = "; ".join(passed_over.values()) or "it takes nothing by cuda"
            raise TriptychError("unavailable", f"no way to {self._receiver_id}: {why}")
        return None

    async def _brought_to_host(self, data: DeviceBuffer, deadline_s: float) -> memoryview:
        try:
            async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
                return await asyncio.to_thread(data.to_host)
        except TimeoutError as error:
            message = f"{data.nbytes} bytes did not come from the GPU in time to be sent to {self._receiver_id}"
            raise TriptychError("unavailable", message) from error

    def _usable(self, passed_over: dict[str, str]) -> Iterator[Connection[memoryview]]:
        """Yield every connection but those avoided after a recent failure; the last connection always.

        Raises TriptychError("unavailable") once the route is closed: no owner would close a new connection.
        """
        for number, (scheme, make) in enumerate(self._makers.items(), 1):
            if self._closed:
                raise TriptychError("unavailable", f"{self._receiver_id} has gone")
            if number < len(self._makers) and self._is_avoided(scheme):
                passed_over[scheme] = _avoided(scheme)
                continue
            if scheme not in self._connections:
                self._connections[scheme] = make()
            yield self._connections[scheme]

    def _is_avoided(self, scheme: str) -> bool:
        return self._avoided_until_s.get(scheme, 0.0) > time.monotonic()

    async def _sent_by(
        self, connection: Connection[Sent], header: TensorHeader, data: Sent, deadline_s: float, over: dict[str, str]
    ) -> bool:
        """Return False, and note the reason, if the connection does not reach the receiver."""
        try:
            await connection.send(header, data, max(0.0, deadline_s - time.monotonic()))
            return True
        except Unreachable as error:
            over[connection.scheme] = error.info.message
            self._avoided_until_s[connection.scheme] = time.monotonic() + AVOID_S
            log.info("another transport is tried", receiver=self._receiver_id, why=error.info.message)
            return False
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and task is not None and not task.cancelling():  # ZMQ ends pending calls like this
                raise TriptychError("unavailable", f"{self._receiver_id} has gone") from None
            raise


def _avoided(scheme: str) -> str:
    return f"{scheme} has led nowhere within the last {AVOID_S:g} s"
