"""The encoder worker: media in, encoder outputs to other instances."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, ClassVar

from broker.handoff.channels import ChannelName, Delivery
from broker.handoff.sender import HandoffSender
from common.errors import ErrorInfo
from common.messages import Encode, Failed, Generate, InstanceRecord, Role, ToWorker
from engine.core.encoder_engine import OUTGOING_BYTES
from engine.device.choice import choose_device
from engine.device.memory import output_cache_bytes
from services.encode.encode_stage import EncodeStage
from services.encode.output_sink import RemoteSink
from services.handoff.payloads import Outgoing
from services.worker_context import WorkerContext


class EncoderService:
    """See services.worker_context.RoleService."""

    role: ClassVar[Role] = "encoder"
    channels: ClassVar[tuple[ChannelName, ...]] = ("allocated", "injected")
    tensor_address = ""
    encodes = False

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._tensors = context.tensor_sender()
        self._handoffs = HandoffSender(context.channels, self._tensors, context.settings.handoff_timeout_s)
        engine = context.settings.engine
        kept_bytes = output_cache_bytes(engine, choose_device(engine.device))
        self.stage = EncodeStage(
            context,
            RemoteSink(context, self._handoffs),
            prepare=Outgoing(OUTGOING_BYTES["cuda"] + kept_bytes).keep,
            output_cache_bytes=kept_bytes,
            owners=context.proxies,
        )
        self.threads = (self.stage.thread,)
        context.metrics.gauges["handoffs_open"] = lambda: self._handoffs.num_open
        context.metrics.tallies["handoffs"] = lambda: self._handoffs.outcomes

    async def start(self, own: InstanceRecord) -> None:
        self._handoffs.own = own
        await self.stage.start()

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        return [self.stage.run()]

    async def review(self) -> None:
        self._handoffs.review(await self._context.registry.find(self._handoffs.presence.ids))

    def handle_request(self, proxy: bytes, message: ToWorker) -> None:
        if isinstance(message, Encode):
            self.stage.submit(proxy, message)
        elif isinstance(message, Generate):
            what = f"{self._context.instance_id} is an encoder: it generates nothing"
            self._context.send(proxy, Failed(message.request_id, ErrorInfo("invalid_request", what), message.attempt))

    def handle_delivery(self, delivery: Delivery) -> None:
        self._handoffs.handle(delivery)

    def abort(self, request_id: str) -> None:
        self._context.proxies.remove(request_id)
        self.stage.abort(request_id)

    def close(self) -> None:
        self.stage.close()
        self._tensors.close()
