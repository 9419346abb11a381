"""The receiver's side of the handoff: offers and tensors in, grants and receipts out.

Receives encoder outputs, and KV under an input id of its own. Checks all that needs no request; the engine decides.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Final

import torch

from broker.handoff.channels import Delivery
from broker.handoff.sender import Key, key_of
from broker.transports.received import PushTarget, ReceivedTensor
from broker.transports.tensors import payload_fault
from common.errors import ErrorInfo
from common.messages import KV_INPUT_ID, Grant, KvOffer, Offer, Receipt, TensorHeader, Withdraw
from common.telemetry import get_logger
from engine.core.decoder_engine import DecoderEngine
from engine.device.choice import DTYPES, choose_device
from engine.device.memory import memory_budget
from engine.handoff.offer_check import KvPart
from engine.state.events import Event
from services.handoff.kv_sender import PART_BYTES
from services.handoff.payloads import keep_for_this_stream, tensor_of
from services.handoff.receive_buffers import DeviceReceiveBuffers, ReceiveBuffers
from services.process.engine_thread import EngineThread
from services.worker_context import WorkerContext

MAX_OFFERS: Final = 20_000
MAX_DEVICE_PARTS: Final = 4
"""Parts of KV on a GPU, each of PART_BYTES at most, that the engine has not copied into its blocks yet."""

log = get_logger()


class HandoffReceiver:
    """All handoffs to this instance, for the engine of `thread`."""

    def __init__(self, context: WorkerContext, thread: EngineThread[DecoderEngine, Event]) -> None:
        self._context = context
        self._thread = thread
        config = context.engine_config
        # A cache without a setting gets its size later, within the budget of memory.
        limit = config.encoder_cache_bytes or memory_budget(config, choose_device(config.device))
        self._tensors = context.tensor_receiver(max(limit, 2 * PART_BYTES))
        self.tensor_address = self._tensors.address
        self._offers: dict[Key, Offer | KvOffer] = {}  # until settled
        cuda = context.cuda
        self._buffers = ReceiveBuffers() if cuda is None else DeviceReceiveBuffers(cuda, choose_device(config.device))
        self._device_parts = asyncio.Semaphore(MAX_DEVICE_PARTS)
        self._stored_s: dict[Key, float] = {}  # when the engine received a tensor, until its receipt
        self.outcomes: Counter[str] = Counter()
        context.metrics.gauges["inputs_landing"] = lambda: len(self._buffers)
        context.metrics.gauges["offers_open"] = lambda: len(self._offers)

    async def run(self) -> None:
        """Receive tensors, until cancelled."""
        while True:
            received = await self._tensors.receive()
            if isinstance(received, PushTarget):
                self._expect(received)
            elif not await self._receive(received):
                received.release()
            del received  # or the memory would be kept until the next tensor comes

    def close(self) -> None:
        self._tensors.close()

    def handle(self, delivery: Delivery) -> None:
        """Handle an offer or a withdrawal. Never raises."""
        message, key = delivery.message, key_of(delivery.message)
        match message:
            case Offer() | KvOffer() if delivery.stale:
                self._answer(message.sender, Grant(*key, "cancelled"))
            case Offer() | KvOffer() if (error := self._refusal(key, message)) is not None:
                self._answer(message.sender, Grant(*key, "refused", error=error))
            case Offer() | KvOffer():
                self._context.hops.mark(key, "offer_received")
                self._offers[key] = message
                self._thread.submit(lambda engine: engine.offer(message))
            case Withdraw():
                self._withdraw(key, message)
            case _:
                self.outcomes["stray"] += 1

    def settle(self, answer: Grant | Receipt) -> None:
        """Send an answer of the engine to the sender of its offer or tensor."""
        key = key_of(answer)
        offer = self._offers.get(key)
        match answer:
            case Grant(status="granted"):
                self._context.hops.mark(key, "granted", since="offer_received")
                if isinstance(offer, Offer):  # the tensor may come now
                    self._buffers.prepare(key, offer.sender, offer.shape, offer.dtype)
                is_open = True
            case Receipt(status="stored"):
                self._context.hops.mark(key, "stored", self._stored_s.pop(key, None), since="tensor_received")
                is_open = answer.input_id == KV_INPUT_ID  # more parts may come
            case _:
                self._stored_s.pop(key, None)
                is_open = answer.status == "corrupt"  # the tensor comes again
        if offer is not None:  # else the sender has had an answer
            self._answer(offer.sender, answer)
        if not is_open:
            self._discard(key)

    def started(self, request_id: str, attempt: int) -> None:
        """Discard the KV offers of an attempt up to `attempt`: the request generates, and all KV is here."""
        log.debug("first token", request=request_id, attempt=attempt)
        for key, offer in list(self._offers.items()):
            if isinstance(offer, KvOffer) and offer.request_id == request_id and offer.request_attempt <= attempt:
                self._discard(key)

    # --- offers

    def _refusal(self, key: Key, offer: Offer | KvOffer) -> ErrorInfo | None:
        """Return the reason to refuse an offer at once; None to submit the offer to the engine."""
        if isinstance(offer, Offer):  # the engine compares KV offers with its model
            if offer.input_id == KV_INPUT_ID:
                fault: str | None = f"input id {KV_INPUT_ID} is that of keys and values, not of an encoder's output"
            elif offer.dtype not in DTYPES:
                fault = f"dtype {offer.dtype!r} is none of {', '.join(DTYPES)}"
            else:
                fault = payload_fault(offer, offer.size_bytes)
            if fault is not None:
                return ErrorInfo("internal_error", fault)
        if key not in self._offers and len(self._offers) >= MAX_OFFERS:
            self.outcomes["overflow"] += 1
            what = f"{len(self._offers)} offers are under way to {self._context.instance_id}, the limit is {MAX_OFFERS}"
            return ErrorInfo("overloaded", f"{what}: try again later")
        return None

    def _withdraw(self, key: Key, withdrawal: Withdraw) -> None:
        """Free the memory of an offer that is not settled yet: the sender may not know of a settled offer."""
        offer = self._offers.get(key)
        if offer is not None and offer.sender == withdrawal.sender:
            self.outcomes["withdrawn"] += 1
            self._discard(key)
            self._thread.submit(lambda engine: engine.withdraw(*key))

    def _discard(self, key: Key) -> None:
        self._offers.pop(key, None)
        self._buffers.discard(key)

    def _answer(self, sender: str, answer: Grant | Receipt) -> None:
        if isinstance(answer, Grant):
            self.outcomes[answer.status] += 1
            self._context.channels.send(sender, "allocated", answer)
        else:
            self.outcomes[f"receipt_{answer.status}"] += 1
            self._context.channels.send(sender, "injected", answer)

    def _expect(self, target: PushTarget) -> None:
        """Accept memory pushed by the sender of an offer; discard the memory of a tensor that is not awaited."""
        header, key = target.header, key_of(target.header)
        offer = self._offers.get(key)
        is_awaited = isinstance(offer, Offer) and _as_offered(offer) == _as_offered(header)
        if not (is_awaited and header.receiver_epoch == self._context.epoch and self._buffers.expect(key, target)):
            target.discard()

    # --- tensors

    async def _receive(self, received: ReceivedTensor) -> bool:
        """Submit an awaited tensor to the engine. Return True if the engine releases the memory."""
        key, offer = key_of(received.header), self._expected(received)
        if isinstance(offer, KvOffer):
            return await self._receive_part(key, received)
        if offer is not None:
            tensor = await self._buffers.receive(key, received)  # perhaps a copy, made while the engine is computing
            if isinstance(tensor, str):
                self._refuse(key, received.header, tensor)
            else:  # submitted to the engine, which decides between two steps
                self._context.hops.mark(key, "landed")
                self._thread.submit(partial(self._deliver, key=key, tensor=tensor))
        return False

    def _expected(self, received: ReceivedTensor) -> Offer | KvOffer | None:
        """Return the offer of a tensor. None for a tensor that is not awaited, after a receipt to the sender."""
        header, key = received.header, key_of(received.header)
        offer = self._offers.get(key)
        if offer is not None and offer.sender != header.sender:
            self.outcomes["stray"] += 1
        elif offer is None or header.receiver_epoch != self._context.epoch:
            self._answer(header.sender, Receipt(*key, "cancelled", header.part))
        elif (fault := received.fault or _tensor_fault(received, offer)) is not None:
            self._refuse(key, header, fault)
        else:
            self._context.hops.mark(key, "tensor_received")
            return offer
        return None

    async def _receive_part(self, key: Key, received: ReceivedTensor) -> bool:
        """Submit KV to the engine, which copies into its blocks. Return True if the engine releases the part.

        Parts for a GPU are copied to the device first; at most MAX_DEVICE_PARTS parts wait there for a step.
        """
        if isinstance(self._buffers, DeviceReceiveBuffers):
            await self._device_parts.acquire()
            tensor = await self._buffers.receive(key, received)
            if isinstance(tensor, str):
                self._device_parts.release()
                self._refuse(key, received.header, tensor)
            else:
                release = partial(asyncio.get_running_loop().call_soon_threadsafe, self._device_parts.release)
                self._thread.submit(lambda engine: self._deliver_part(engine, key, received.header, tensor, release))
            return False
        fault, data = await received.verify(), received.data
        if fault is not None:
            self._refuse(key, received.header, fault)
            return False
        assert isinstance(data, memoryview)  # no way from a GPU leads to a CPU
        tokens = tensor_of(data, received.header.shape, DTYPES[received.header.dtype])
        self._thread.submit(lambda engine: self._deliver_part(engine, key, received.header, tokens, received.release))
        return True

    def _refuse(self, key: Key, header: TensorHeader, fault: str) -> None:
        log.warning("a tensor is not what was offered", sender=header.sender, fault=fault)
        self._answer(header.sender, Receipt(*key, "corrupt", header.part))

    # --- on the engine's thread

    def _deliver(self, engine: DecoderEngine, key: Key, tensor: torch.Tensor) -> None:
        keep_for_this_stream(tensor)
        engine.deliver(*key, tensor)
        self._stored_s[key] = time.time()

    def _deliver_part(
        self, engine: DecoderEngine, key: Key, header: TensorHeader, tokens: torch.Tensor, release: Callable[[], object]
    ) -> None:
        """Copy a part into the engine's blocks."""
        assert header.table != ""
        part = KvPart(header.part, header.table, header.first, tokens)
        try:
            keep_for_this_stream(tokens)
            engine.deliver_kv(header.request_id, header.attempt, part)
            self._stored_s[key] = time.time()
        finally:
            release()


def _as_offered(what: Offer | TensorHeader) -> tuple[str, list[int], str, int]:
    """Return the fields common to an offer and the header of its tensor."""
    return what.sender, what.shape, what.dtype, what.size_bytes


def _tensor_fault(received: ReceivedTensor, offer: Offer | KvOffer) -> str | None:
    """Return the mismatch between a tensor and its offer, or what torch cannot make; None for a correct tensor."""
    header = received.header
    if isinstance(offer, KvOffer):  # the engine compares parts with its model
        good = header.table != "" and header.dtype in DTYPES
        return None if good else f"a part of table {header.table!r} and dtype {header.dtype}"
    if (header.shape, header.dtype, header.size_bytes) == (offer.shape, offer.dtype, offer.size_bytes):
        return None
    return f"offered {offer.shape} {offer.dtype}, came {header.shape} {header.dtype}"
