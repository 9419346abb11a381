"""The prefill worker."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import ClassVar

from broker.handoff.channels import ChannelName, Delivery
from broker.handoff.sender import HandoffSender
from common.errors import ErrorInfo
from common.messages import Failed, Generate, Grant, InstanceRecord, Prefilled, Receipt, Role
from engine.state.events import Event, PrefillEvent
from services.handoff.kv_sender import KvSender
from services.process.request_owners import OwnedRequest
from services.roles.decoder import DecoderService
from services.worker_context import WorkerContext


class PrefillService(DecoderService):
    """Receives inputs from encoders, and sends KV to decode workers. Samples no tokens."""

    role: ClassVar[Role] = "prefill"
    channels: ClassVar[tuple[ChannelName, ...]] = ("metadata", "allocated", "injected")
    may_encode = True

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._tensors = context.tensor_sender()
        self._handoffs = HandoffSender(context.channels, self._tensors, context.settings.handoff_timeout_s)
        self._sender = KvSender(context, self.thread, self._handoffs)
        context.metrics.gauges["prefills_open"] = lambda: self._sender.num_open
        early_parts = "kv_parts_sent_while_prefilling_total"
        context.metrics.gauges[early_parts] = lambda: self._sender.num_parts_while_prefilling
        context.metrics.gauges["handoffs_open"] = lambda: self._handoffs.num_open
        context.metrics.tallies["prefills"] = lambda: self._sender.outcomes
        context.metrics.tallies["kv_handoffs"] = lambda: self._handoffs.outcomes

    async def start(self, own: InstanceRecord) -> None:
        self._handoffs.own = own
        await super().start(own)

    async def review(self) -> None:
        self._handoffs.review(await self._context.registry.find(self._handoffs.presence.ids))

    def handle_delivery(self, delivery: Delivery) -> None:
        if isinstance(delivery.message, Grant | Receipt):
            self._handoffs.handle(delivery)
        else:
            super().handle_delivery(delivery)

    def close(self) -> None:
        self._sender.close()
        super().close()
        self._tensors.close()

    def abort(self, request_id: str) -> None:
        self._sender.discard(request_id)
        super().abort(request_id)

    def _refusal(self, message: Generate) -> str | None:
        if not message.prefill_for:
            return "a request has to name the decode worker that it is prefilled for"
        if message.prefilled:
            return "a request cannot be prefilled here and elsewhere"
        return None

    def _refuse(self, proxy: bytes, message: Generate, error: ErrorInfo) -> None:
        self._context.send(proxy, Prefilled(message.request_id, message.attempt, error))

    def _begin(self, proxy: bytes, message: Generate) -> None:
        super()._begin(proxy, message)
        task = self._sender.begin(message)
        task.add_done_callback(partial(self._end, message.request_id, self._context.proxies.get(message.request_id)))

    def _end(self, request_id: str, request: OwnedRequest | None, _: asyncio.Task[None]) -> None:
        """Forget a request after its reply, but no later attempt, and none that was aborted before."""
        if request is not None and self._context.proxies.get(request_id) is request:
            self._give_up(request_id)

    def _handle_event(self, event: Event) -> None:
        if isinstance(event, PrefillEvent):
            self._sender.handle(event)
        else:
            super()._handle_event(event)

    def _fail(self, event: Failed) -> None:
        self._sender.handle(event)
