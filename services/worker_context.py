"""The contract between a worker process and its role: the connections given to a role, and the methods of a role."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

import zmq.asyncio
from redis.asyncio import Redis
from redis.exceptions import RedisError

from broker.cluster.registry import HEARTBEAT_S, Registry
from broker.cluster.rpc import Outcome, WorkerServer
from broker.handoff.channels import ChannelName, ChannelSender, Delivery
from broker.transports.cuda.runtime import CudaRuntime
from broker.transports.factory import TransportContext
from broker.transports.tensors import TensorReceiver, TensorSender
from common.config import EngineConfig, Settings
from common.errors import TriptychError
from common.messages import FromWorker, Heartbeat, InstanceRecord, Role, ToWorker
from common.model_info import ModelInfo
from services.process.engine_thread import EngineThread
from services.process.gpu_reserve import engine_on_gpu
from services.process.handoff_trace import HandoffTrace
from services.process.metrics import WorkerMetrics
from services.process.request_owners import RequestOwners

LOOKUP_S: Final = 1.5 * HEARTBEAT_S
_LOOKUP_PAUSE_S: Final = 0.1


@dataclass(frozen=True)
class WorkerContext:
    """The connections of one worker process, its metrics and its trace of handoffs."""

    settings: Settings
    info: ModelInfo
    instance_id: str
    epoch: int
    host: str
    dtype: str
    zmq_context: zmq.asyncio.Context
    redis: Redis
    registry: Registry
    channels: ChannelSender
    server: WorkerServer
    proxies: RequestOwners
    metrics: WorkerMetrics
    hops: HandoffTrace
    cuda: CudaRuntime | None = None
    """Set if the engine computes on a GPU."""

    @property
    def engine_config(self) -> EngineConfig:
        """The engine's settings; on a GPU, memory is left for NIXL unless the user has set `process_bytes`."""
        return self.settings.engine if self.cuda is None else engine_on_gpu(self.settings, self.host)

    def tensor_receiver(self, max_bytes: int) -> TensorReceiver:
        """Open a receiver for tensors of at most `max_bytes`, by the configured transports. Needs a running loop."""
        means = self._transport_context()
        receiver = TensorReceiver(means, max_bytes=max_bytes, stale_s=self.settings.handoff_timeout_s)
        self.metrics.gauges["tensors_invalid_total"] = lambda: receiver.num_invalid
        self.metrics.gauges["tensors_unfinished_total"] = lambda: receiver.num_unfinished
        return receiver

    def tensor_sender(self) -> TensorSender:
        """Open a sender for tensors, by the configured transports."""
        sender = TensorSender(self._transport_context())
        self.metrics.tallies["tensors_sent"] = lambda: sender.num_sent
        self.metrics.tallies["tensor_fallbacks"] = lambda: sender.num_fallbacks
        return sender

    def _transport_context(self) -> TransportContext:
        settings = self.settings
        return TransportContext(
            self.zmq_context, self.host, settings.transport, self.redis, settings.cluster, self.cuda
        )

    async def find_instance(
        self, instance_id: str, seen: Callable[[str], InstanceRecord | None]
    ) -> InstanceRecord | None:
        """Return another instance's record: `seen` lately, or registered within LOOKUP_S; None for an unknown instance.

        Raises TriptychError("unavailable") without a broker, after `handoff_timeout_s` at the latest.
        """
        deadline_s = time.monotonic() + LOOKUP_S
        timeout_s = self.settings.handoff_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    record = seen(instance_id) or await self.registry.get(instance_id)
                    if record is not None or time.monotonic() > deadline_s:
                        return record
                    await asyncio.sleep(_LOOKUP_PAUSE_S)
        except (RedisError, TimeoutError) as error:
            why = str(error) or f"nothing within {timeout_s:g} s"
            message = f"the broker does not answer, and {instance_id} cannot be looked up: {why}"
            raise TriptychError("unavailable", message) from error

    def reply(self, request_id: str, message: FromWorker) -> None:
        """Send to the proxy of a request; messages about an unknown request are discarded."""
        request = self.proxies.get(request_id)
        if request is not None:
            self.send(request.proxy, message)

    def send(self, proxy: bytes, *messages: FromWorker | Heartbeat) -> list[Outcome]:
        """Send to a proxy, as `WorkerServer.send`. A proxy with a broken connection counts as gone."""
        outcomes = self.server.send(proxy, *messages)
        if "gone" in outcomes:
            self.proxies.mark_gone(proxy)
        return outcomes


class RoleService(Protocol):
    """One role of a worker. All methods are called on the loop; methods without `async` return at once."""

    role: ClassVar[Role]
    channels: ClassVar[tuple[ChannelName, ...]]
    """Channels that the role reads."""
    tensor_address: str
    """Bound address for tensors; empty for a role that receives no tensors."""

    @property
    def encodes(self) -> bool:
        """Whether the role can encode the inputs of its own requests."""

    @property
    def threads(self) -> tuple[EngineThread[Any, Any], ...]:
        """Engines in starting order; each starts once the previous engine is loaded."""

    async def start(self, own: InstanceRecord) -> None:
        """Get ready: the engines are loaded."""

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        """Return coroutines that run as long as the worker."""

    def handle_request(self, proxy: bytes, message: ToWorker) -> None: ...

    def handle_delivery(self, delivery: Delivery) -> None: ...

    def abort(self, request_id: str) -> None:
        """Forget a request and free all its memory, known or not."""

    async def review(self) -> None:
        """Look up the instances that the role sends to, and no others: in a cell of thousands, each would read all.
        Called about once a second."""

    def close(self) -> None: ...
