"""The prefill-decode worker: requests and inputs in, tokens out. It never computes an encoder.

It translates between messages and the engine's commands and events; every decision is the engine's.
"""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict
from collections.abc import Coroutine
from typing import Any, ClassVar, Final

import numpy as np

from broker.channels import ChannelName, Delivery
from broker.handoff import Key, key_of
from broker.tensors import ReceivedTensor, payload_fault
from common.errors import ErrorInfo
from common.messages import (
    Encode,
    Encoded,
    Failed,
    Generate,
    Grant,
    InputNeeded,
    InstanceRecord,
    Offer,
    Receipt,
    Role,
    StopSequence,
    TensorHeader,
    Tokens,
    ToWorker,
)
from common.telemetry import get_logger
from engine.cache.block_pool import IntegrityError
from engine.decoder_engine import DecoderEngine
from engine.device import choose_device
from engine.events import (
    Event,
    InputCached,
    InputCancelled,
    InputGranted,
    InputLost,
    InputMetadata,
    InputRefused,
    InputRejected,
    InputStored,
    KvComputed,
    KvReady,
    PrefillEnded,
    RequestFailed,
    TokensReady,
)
from engine.memory import memory_budget
from services.engine_thread import EngineThread
from services.links import Links

MAX_OFFERS: Final = 20_000
ALIGNMENT_BYTES: Final = 8

log = get_logger()


class PrefillDecodeService:
    """See services.links.RoleService."""

    role: ClassVar[Role] = "prefill_decode"
    channels: ClassVar[tuple[ChannelName, ...]] = ("metadata",)

    def __init__(self, links: Links) -> None:
        self._links = links
        config = links.settings.engine
        # Where the cache's size is measured it is not known yet, but what it is measured against is.
        limit = config.encoder_cache_bytes or memory_budget(config, choose_device(config.device))
        self._tensors = links.tensor_receiver(limit)
        self.tensor_address = self._tensors.address
        self._offers: OrderedDict[Key, Offer] = OrderedDict()  # what was offered, until it is settled
        self._arrived_s: dict[str, float] = {}  # requests without a token yet
        self._outcomes: Counter[str] = Counter()
        self._idle_checks = IdleCheck()
        self.thread: EngineThread[DecoderEngine, Event] = EngineThread(
            build=lambda: DecoderEngine(
                links.info, config, links.instance_id, lease_s=links.settings.handoff_timeout_s
            ),
            step=self._idle_checks.step,
            next_deadline_s=lambda engine: engine.next_deadline_s(),
            on_events=self._handle_events,
            answer=lambda engine: engine.answer(),
        )
        links.metrics.tallies["handoffs"] = lambda: self._outcomes
        links.metrics.gauges["integrity_failures"] = lambda: self._idle_checks.num_failures

    async def start(self, own: InstanceRecord) -> None:
        """Nothing more to do."""

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        return [self._take_tensors()]

    def review(self, instances: dict[str, InstanceRecord]) -> None:
        """Nothing: what a lost encoder has offered ends by its deadline, or by the next attempt."""

    def close(self) -> None:
        self._tensors.close()

    # --- from proxies

    def handle_request(self, proxy: bytes, message: ToWorker) -> None:
        if isinstance(message, Generate):
            self._generate(proxy, message)
        elif isinstance(message, StopSequence):
            request_id, index = message.request_id, message.index
            if self._links.proxies.owner(request_id) == proxy:
                self.thread.submit(lambda engine: engine.stop_sequence(request_id, index))
        elif isinstance(message, Encode):
            error = ErrorInfo(
                "invalid_request", f"{self._links.instance_id} is a prefill_decode worker, not an encoder"
            )
            self._links.server.send(proxy, Encoded(message.request_id, message.input_id, message.attempt, error))

    def abort(self, request_id: str) -> None:
        self._arrived_s.pop(request_id, None)
        self.thread.submit(lambda engine: engine.abort(request_id))

    def _generate(self, proxy: bytes, message: Generate) -> None:
        owner = self._links.proxies.owner(message.request_id)
        if owner is not None:
            self._outcomes["duplicate_request"] += 1
            if owner != proxy:  # it came on a connection that has been given up: on this one, nothing would ever come
                where = f"{self._links.instance_id} is still at an earlier attempt of this request"
                error = ErrorInfo("unavailable", f"{where}, which ends in seconds: try again")
                self._links.server.send(proxy, Failed(message.request_id, error))
            return
        self._links.proxies.add(proxy, message.request_id)
        self._arrived_s[message.request_id] = time.monotonic()
        self.thread.submit(
            lambda engine: engine.add_request(
                message.request_id,
                message.prompt_token_ids,
                message.inputs,
                message.sampling,
                message.priority,
                message.resumed,
            )
        )

    # --- from encoders

    def handle_delivery(self, delivery: Delivery) -> None:
        offer = delivery.message
        if not isinstance(offer, Offer):
            self._outcomes["stray"] += 1
            return
        key = key_of(offer)
        if delivery.stale:
            self._answer_offer(offer.sender, Grant(*key, "cancelled"))
            return
        fault = payload_fault(offer, offer.size_bytes)
        if not math.isfinite(offer.deadline_s):
            fault = f"deadline_s is {offer.deadline_s}, not a time"
        if fault is not None:
            self._answer_offer(offer.sender, Grant(*key, "refused", error=ErrorInfo("invalid_request", fault)))
            return
        self._links.hops.mark(key, "offer_received")
        self._offers[key] = offer
        self._offers.move_to_end(key)
        while len(self._offers) > MAX_OFFERS:
            self._offers.popitem(last=False)
        metadata = InputMetadata(tuple(offer.shape), offer.dtype, offer.size_bytes, offer.layout, offer.content_hash)
        self.thread.submit(lambda engine: engine.offer(*key, metadata, offer.deadline_s))

    async def _take_tensors(self) -> None:
        while True:
            self._take_tensor(await self._tensors.receive())

    def _take_tensor(self, received: ReceivedTensor) -> None:
        header, key = received.header, key_of(received.header)
        offer = self._offers.get(key)
        if offer is not None and offer.sender != header.sender:
            self._outcomes["stray"] += 1
        elif offer is None or header.receiver_epoch != self._links.epoch:
            self._answer_tensor(header.sender, Receipt(*key, "cancelled"))
        elif (fault := received.fault or _difference(header, offer)) is not None:
            log.warning("a tensor is not what was offered", sender=header.sender, fault=fault)
            self._answer_tensor(header.sender, Receipt(*key, "corrupt"))
        else:
            self._links.hops.mark(key, "tensor_received")
            data, shape, dtype = aligned(received.data), tuple(header.shape), header.dtype
            self.thread.submit(lambda engine: engine.deliver_bytes(*key, shape, dtype, data))

    def _answer_offer(self, sender: str | None, grant: Grant) -> None:
        self._outcomes[grant.status] += 1
        if sender is not None:
            self._links.channels.send(sender, "allocated", grant)

    def _answer_tensor(self, sender: str | None, receipt: Receipt) -> None:
        self._outcomes[f"receipt_{receipt.status}"] += 1
        if sender is not None:
            self._links.channels.send(sender, "injected", receipt)

    # --- from the engine

    def _handle_events(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, TokensReady):
                self._send_tokens(event)
            elif isinstance(event, RequestFailed):
                self._links.reply(event.request_id, Failed(event.request_id, event.error))
                self._forget(event.request_id)
            elif isinstance(event, InputLost):
                self._outcomes["input_needed"] += 1
                self._links.reply(event.request_id, InputNeeded(event.request_id, event.input_id))
            elif not isinstance(event, KvReady | KvComputed | PrefillEnded):
                self._settle_input(event)

    def _send_tokens(self, event: TokensReady) -> None:
        arrived_s = self._arrived_s.pop(event.request_id, None)
        if arrived_s is not None:
            self._links.metrics.first_token_seconds.observe(time.monotonic() - arrived_s)
        self._links.reply(
            event.request_id,
            Tokens(
                event.request_id,
                event.offset,
                event.token_ids,
                event.finish_reason,
                event.num_prompt_tokens,
                event.spans,
                index=event.index,
                done=event.done,
                num_cached_tokens=event.num_cached_tokens,
                logprobs=event.logprobs,
                prompt_logprobs=event.prompt_logprobs,
                score=event.score,
            ),
        )
        if event.done:
            self._links.metrics.observe_spans(event.spans)
            self._forget(event.request_id)

    def _forget(self, request_id: str) -> None:
        self._links.proxies.remove(request_id)
        self._arrived_s.pop(request_id, None)

    def _settle_input(
        self, event: InputGranted | InputCached | InputRefused | InputCancelled | InputStored | InputRejected
    ) -> None:
        key = event.request_id, event.input_id, event.attempt
        if isinstance(event, InputGranted):
            self._mark_hop(key, "offer_received", "granted")
            self._answer_offer(self._sender(key), Grant(*key, "granted", event.lease_until_s))
            return
        sender = self._sender(key)
        self._offers.pop(key, None)
        if isinstance(event, InputStored):
            self._mark_hop(key, "tensor_received", "stored")
            self._answer_tensor(sender, Receipt(*key, "stored"))
        elif isinstance(event, InputRejected):
            self._answer_tensor(sender, Receipt(*key, event.reason))
        elif isinstance(event, InputCached):
            self._answer_offer(sender, Grant(*key, "cached"))
        elif isinstance(event, InputRefused):
            self._answer_offer(sender, Grant(*key, "refused", error=event.error))
        else:
            self._answer_offer(sender, Grant(*key, "cancelled"))

    def _sender(self, key: Key) -> str | None:
        offer = self._offers.get(key)
        return None if offer is None else offer.sender

    def _mark_hop(self, key: Key, start: str, end: str) -> None:
        self._links.hops.mark(key, end)
        elapsed_s = self._links.hops.elapsed_s(key, start, end)
        if elapsed_s is not None:
            self._links.metrics.hop_seconds.labels(f"{start}_to_{end}").observe(elapsed_s)


class IdleCheck:
    """Steps an engine, and checks its books each time it has become empty."""

    def __init__(self) -> None:
        self.num_failures = 0
        self._checked = True

    def step(self, engine: DecoderEngine) -> list[Event]:
        events = engine.step()
        if not engine.is_empty():
            self._checked = False
        elif not self._checked:
            self._checked = True
            try:
                engine.check_integrity()
            except IntegrityError as error:  # a leak is no reason to drop everybody's requests: say it loudly
                self.num_failures += 1
                log.error("the engine's books do not add up", error=str(error))
        return events


def _difference(header: TensorHeader, offer: Offer) -> str | None:
    """What a tensor's header says other than its offer did; None if nothing."""
    if (header.shape, header.dtype, header.size_bytes) == (offer.shape, offer.dtype, offer.size_bytes):
        return None
    return f"offered {offer.shape} {offer.dtype}, came {header.shape} {header.dtype}"


def aligned(data: memoryview) -> memoryview:
    """The same bytes at an address that tensors may use; copied only where ZMQ has put them at an odd one."""
    address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return data if address % ALIGNMENT_BYTES == 0 else memoryview(bytearray(data))
