"""Where encoder outputs go: to another instance, by the handoff over channels and transports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

import torch
from redis.exceptions import RedisError

from broker.cluster.registry import HEARTBEAT_S
from broker.handoff.sender import Handoff, HandoffSender, Key
from broker.transports.shm.push_buffer import EarlySend
from common.errors import TriptychError
from common.messages import Encode, InstanceRecord, KvOffer, Offer
from engine.processors import ProcessedInput
from services.handoff.device_tensors import payload_of
from services.handoff.tensor_bytes import bytes_of
from services.worker_context import WorkerContext

LOOKUP_S: Final = 1.5 * HEARTBEAT_S
_LOOKUP_PAUSE_S: Final = 0.1


class OutputSink(Protocol):
    """Takes encoder outputs into reserved room: one handoff per key, from `offer` to `close`."""

    async def offer(self, key: Key, message: Encode, item: ProcessedInput) -> bool:
        """Wait for room. False where the content is there already: nothing need be computed.

        Raises TriptychError saying why there will be none, or that there was none in time.
        """

    async def deliver(self, key: Key, tensor: torch.Tensor) -> None:
        """Put a tensor into the room that it was granted. Raises TriptychError where it is not taken."""

    def early(self, key: Key) -> Callable[[torch.Tensor], None] | None:
        """What the thread that makes the tensor may call with it, ahead of `deliver`; None where nothing is gained."""

    def close(self, key: Key) -> None:
        """Let go of a handoff, finished or not; unknown keys are fine."""


class RemoteSink:
    """The instance that each Encode names. See `OutputSink`; tensors have to be complete and in one piece."""

    def __init__(self, links: WorkerContext, handoffs: HandoffSender) -> None:
        self._links = links
        self._handoffs = handoffs
        self._granted: dict[Key, Handoff] = {}
        self._early: dict[Key, EarlySend] = {}

    async def offer(self, key: Key, message: Encode, item: ProcessedInput) -> bool:
        handoff = await self._handoffs.offer(self._make_offer(message, item), await self._receiver(message.destination))
        if handoff.grant.result().status == "cached":
            return False
        self._granted[key] = handoff
        return True

    async def deliver(self, key: Key, tensor: torch.Tensor) -> None:
        handoff = self._granted[key]
        dtype = str(tensor.dtype).removeprefix("torch.")
        early = self._early.get(key)
        await self._handoffs.deliver(handoff, list(tensor.shape), dtype, payload_of(tensor), early)
        self._links.note_handoff(key, handoff)

    def early(self, key: Key) -> Callable[[torch.Tensor], None] | None:
        handoff = self._granted[key]
        sending = self._handoffs.give(handoff) if self._links.cuda is None else None
        if sending is None:
            return None
        self._early[key] = sending
        return partial(_send_as_offered, sending, handoff.offer)

    def close(self, key: Key) -> None:
        early = self._early.pop(key, None)
        if early is not None:
            early.drop()
        self._granted.pop(key, None)
        self._handoffs.close(key)

    def _make_offer(self, message: Encode, item: ProcessedInput) -> Offer:
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
            sender=self._links.instance_id,
            deadline_s=min(message.deadline_s, time.monotonic() + self._links.settings.handoff_timeout_s),
            request_attempt=message.request_attempt,
        )

    async def _receiver(self, instance_id: str) -> InstanceRecord | None:
        return await find_instance(self._links, self._handoffs, instance_id)


def _send_as_offered(sending: EarlySend, offer: Offer | KvOffer, tensor: torch.Tensor) -> None:
    """On the thread that has made it. What is not as offered, or not in host memory, is left to `deliver`."""
    what = list(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    if isinstance(offer, Offer) and what == (offer.shape, offer.dtype) and tensor.device.type == "cpu":
        sending.send(bytes_of(tensor))


async def find_instance(links: WorkerContext, handoffs: HandoffSender, instance_id: str) -> InstanceRecord | None:
    """Another instance's record; None if it is not registered. Raises TriptychError("unavailable") without a broker,
    after a step of a handoff at the latest.

    An instance is not given up before it could have entered itself again: Redis may just have been emptied.
    """
    deadline_s = time.monotonic() + LOOKUP_S
    timeout_s = links.settings.handoff_timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                record = handoffs.lately_seen(instance_id) or await links.registry.get(instance_id)
                if record is not None or time.monotonic() > deadline_s:
                    return record
                await asyncio.sleep(_LOOKUP_PAUSE_S)
    except (RedisError, TimeoutError) as error:
        why = str(error) or f"nothing within {timeout_s:g} s"
        message = f"the broker does not answer, and {instance_id} cannot be looked up: {why}"
        raise TriptychError("unavailable", message) from error
