"""Destinations of encoder outputs: another instance, by the handoff over channels and transports."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from broker.handoff.sender import Handoff, HandoffSender, Key
from broker.transports.shm.push_buffer import PushBuffer
from common.messages import Encode, KvOffer, Offer
from engine.processors import ProcessedInput
from services.handoff.payloads import bytes_of, payload_of
from services.worker_context import WorkerContext


class OutputSink(Protocol):
    """Puts encoder outputs into reserved memory: one handoff per key, from `offer` to `close`."""

    async def offer(self, key: Key, message: Encode, item: ProcessedInput) -> bool:
        """Wait for reserved memory. False: the receiver has the content, and the item need not be computed.

        Raises TriptychError with the reason of a refusal, or "timeout" without a grant in time.
        """

    async def deliver(self, key: Key, tensor: torch.Tensor) -> None:
        """Put a tensor into its granted memory. Raises TriptychError for a rejected tensor."""

    def early(self, key: Key) -> Callable[[torch.Tensor], None] | None:
        """Return a function to send the tensor on the engine's thread ahead of `deliver`; None without a gain."""

    def close(self, key: Key) -> None:
        """Discard a handoff, finished or not; unknown keys are fine."""


class RemoteSink:
    """An `OutputSink`: the instance named in each Encode. Tensors have to be complete and contiguous."""

    def __init__(self, context: WorkerContext, handoffs: HandoffSender) -> None:
        self._context = context
        self._handoffs = handoffs
        self._granted: dict[Key, Handoff] = {}

    async def offer(self, key: Key, message: Encode, item: ProcessedInput) -> bool:
        deadline_s = min(message.deadline_s, time.monotonic() + self._context.settings.handoff_timeout_s)
        offer = offer_of(message, item, self._context.instance_id, deadline_s)
        receiver = await self._context.find_instance(message.destination, self._handoffs.presence.get)
        handoff = await self._handoffs.offer(offer, receiver)
        if handoff.grant.result().status == "cached":
            return False
        self._granted[key] = handoff
        return True

    async def deliver(self, key: Key, tensor: torch.Tensor) -> None:
        handoff = self._granted[key]
        dtype = str(tensor.dtype).removeprefix("torch.")
        await self._handoffs.deliver(handoff, list(tensor.shape), dtype, payload_of(tensor))
        self._context.hops.mark_sent(key, handoff.times_s)

    def early(self, key: Key) -> Callable[[torch.Tensor], None] | None:
        handoff = self._granted[key]
        early = self._handoffs.reserve_early(handoff) if self._context.cuda is None else None
        return None if early is None else partial(_send_as_offered, early, handoff.offer)

    def close(self, key: Key) -> None:
        self._granted.pop(key, None)
        self._handoffs.close(key)


def _send_as_offered(early: PushBuffer, offer: Offer | KvOffer, tensor: torch.Tensor) -> None:
    """Send on the engine's thread. A tensor other than offered, or on a GPU, is left to `deliver`."""
    actual = list(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    if isinstance(offer, Offer) and actual == (offer.shape, offer.dtype) and tensor.device.type == "cpu":
        early.send(bytes_of(tensor))


def offer_of(message: Encode, item: ProcessedInput, sender: str, deadline_s: float) -> Offer:
    """Return the offer of an item's encoder output."""
    return Offer(
        request_id=message.request_id,
        input_id=message.input_id,
        attempt=message.attempt,
        content_hash=message.content_hash,
        kind=message.kind,
        shape=list(item.shape),
        dtype=item.dtype,
        size_bytes=item.size_bytes,
        layout=item.layout,
        sender=sender,
        deadline_s=deadline_s,
        request_attempt=message.request_attempt,
    )
