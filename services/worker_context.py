"""What the shell gives to the role that it runs, and what it expects of it."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import zmq.asyncio
from redis.asyncio import Redis

from broker.cluster.registry import Registry
from broker.cluster.rpc import WorkerServer
from broker.handoff.channels import ChannelName, ChannelSender, Delivery
from broker.handoff.sender import Handoff, Key
from broker.transports.cuda.runtime import CudaRuntime
from broker.transports.tensors import TensorReceiver, TensorSender
from common.config import EngineConfig, Settings
from common.messages import FromWorker, InstanceRecord, Role, ToWorker
from common.model_info import ModelInfo
from services.process.engine_thread import EngineThread
from services.process.gpu_reserve import engine_on_gpu
from services.process.handoff_trace import HandoffTrace
from services.process.metrics import WorkerMetrics
from services.process.request_owners import RequestOwners


@dataclass(frozen=True)
class WorkerContext:
    """The connections of one worker process, and where it notes what happens."""

    settings: Settings
    info: ModelInfo
    instance_id: str
    epoch: int
    host: str
    dtype: str
    context: zmq.asyncio.Context
    redis: Redis
    registry: Registry
    channels: ChannelSender
    server: WorkerServer
    proxies: RequestOwners
    metrics: WorkerMetrics
    hops: HandoffTrace
    cuda: CudaRuntime | None = None
    """There where the engine computes on a GPU."""

    @property
    def engine_config(self) -> EngineConfig:
        """The engine's settings; on a GPU, with room beside it for what tensors travel by."""
        return self.settings.engine if self.cuda is None else engine_on_gpu(self.settings, self.host)

    def tensor_receiver(self, max_bytes: int) -> TensorReceiver:
        """Takes tensors of at most `max_bytes` by the transports that the settings name; needs a running loop."""
        settings = self.settings
        receiver = TensorReceiver(
            self.context,
            self.host,
            max_bytes=max_bytes,
            stale_s=settings.handoff_timeout_s,
            transport=settings.transport,
            redis=self.redis,
            cluster=settings.cluster,
            cuda=self.cuda,
        )
        self.metrics.gauges["tensors_invalid_total"] = lambda: receiver.num_invalid
        self.metrics.gauges["tensors_unfinished_total"] = lambda: receiver.num_unfinished
        return receiver

    def tensor_sender(self) -> TensorSender:
        """Sends tensors by the transports that the settings name."""
        transport = self.settings.transport
        sender = TensorSender(self.context, self.host, transport=transport, redis=self.redis, cuda=self.cuda)
        self.metrics.tallies["tensors_sent"] = lambda: sender.num_sent
        self.metrics.tallies["tensor_fallbacks"] = lambda: sender.num_fallbacks
        return sender

    def note_handoff(self, key: Key, handoff: Handoff) -> None:
        """Note when the hops of a finished handoff happened, and how long they took."""
        for moment, at_s in handoff.times_s.items():
            self.hops.mark(key, moment, at_s)
        for start, end in (("offer_sent", "grant_received"), ("tensor_sent", "receipt_received")):
            self.observe_hop(key, start, end)

    def observe_hop(self, key: Key, start: str, end: str) -> None:
        """Count a hop of a handoff in the metrics, if both of its moments have been noted."""
        elapsed_s = self.hops.elapsed_s(key, start, end)
        if elapsed_s is not None:
            self.metrics.hop_seconds.labels(f"{start}_to_{end}").observe(elapsed_s)

    def reply(self, request_id: str, message: FromWorker) -> None:
        """Send to the proxy that owns the request; nobody gets it if the request is unknown."""
        proxy = self.proxies.owner(request_id)
        if proxy is not None:
            self.send(proxy, message)

    def send(self, proxy: bytes, message: FromWorker) -> None:
        """Send to a proxy. One that does not take it counts as gone."""
        if not self.server.send(proxy, message):
            self.proxies.mark_gone(proxy)


class RoleService(Protocol):
    """One role of a worker. All methods are called on the loop; those without `async` return at once."""

    role: ClassVar[Role]
    channels: ClassVar[tuple[ChannelName, ...]]
    """The channels that this role reads."""
    tensor_address: str
    """Where it takes tensors, as bound; empty if it takes none."""

    @property
    def encodes(self) -> bool:
        """Whether it can encode the inputs of its own requests itself."""

    @property
    def threads(self) -> tuple[EngineThread[Any, Any], ...]:
        """Its engines, in the order in which they start, each once the one before it is loaded."""

    async def start(self, own: InstanceRecord) -> None:
        """The engine is loaded; get everything else ready."""

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        """What has to run as long as the worker does."""

    def handle_request(self, proxy: bytes, message: ToWorker) -> None: ...

    def handle_delivery(self, delivery: Delivery) -> None: ...

    def abort(self, request_id: str) -> None:
        """Free everything of a request, known or not."""

    def review(self, instances: dict[str, InstanceRecord]) -> None:
        """The registry as it is now; about once a second."""

    def close(self) -> None: ...
