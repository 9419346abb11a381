"""The life of one item on an encoder: preprocess -> offer -> grant -> encode -> deliver -> receipt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from redis.exceptions import RedisError

from broker.handoff import Handoff, HandoffSender, Key
from common.errors import TriptychError
from common.messages import Encode, InstanceRecord, Offer, Span
from common.telemetry import SpanRecorder
from engine.encoder_engine import EncoderEngine, EncoderResult
from engine.memory import staging_budget
from engine.processors import ProcessedInput
from services.engine_thread import EngineThread
from services.links import Links
from services.preprocess import PreprocessPool
from services.room import Place, Room


@dataclass(frozen=True)
class Encoding:
    """An encoder's output as it travels. Its times (Unix) are those of its batch."""

    shape: list[int]
    dtype: str
    data: memoryview
    start_s: float
    end_s: float


EncodingOutcome = tuple[Key, Encoding | TriptychError]


def encode_step(engine: EncoderEngine) -> list[EncodingOutcome]:
    """One step of the engine, on its thread; the outputs leave it as plain bytes in host memory."""
    return [(result.key, _outcome_of(result)) for result in engine.step()]


class ItemPipeline:
    """Takes one item after another through its life; `run` per item, as many at once as there are."""

    def __init__(
        self,
        links: Links,
        pool: PreprocessPool,
        thread: EngineThread[EncoderEngine, EncodingOutcome],
        handoffs: HandoffSender,
    ) -> None:
        self._links = links
        self._pool = pool
        self._thread = thread
        self._handoffs = handoffs
        self._computing: dict[Key, asyncio.Future[Encoding]] = {}
        # Preprocessed arrays that may wait for grants. Items that find no room wait with their media only.
        self.staging_bytes = staging_budget(links.settings.engine)
        self._room = Room(self.staging_bytes, links.settings.preprocess_workers)
        self._media_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Media and preprocessed arrays of all items under way."""
        return self._media_bytes + self._room.held_bytes

    @property
    def num_waiting(self) -> int:
        """Items that wait for memory or for a process to preprocess them."""
        return self._room.num_waiting + self._pool.num_waiting

    @property
    def num_computing(self) -> int:
        return len(self._computing)

    async def run(self, key: Key, message: Encode, recorder: SpanRecorder) -> None:
        """Return once the input is in place at its destination.

        However this ends, cancellation included, nothing of the item is left in handoffs or engine.
        Raises TriptychError saying why the input is not in place.
        """
        place: Place | None = None
        try:
            with self._holding(len(message.media)):
                recorder.start("preprocess")
                place = await self._room.enter()
                item = await self._preprocess(key, message, recorder)
                place.weigh(sum(array.nbytes for array in item.arrays.values()))
                message = msgspec.structs.replace(message, media=b"")
            handoff = await self._offer(message, item, recorder)
            if handoff.grant.result().status == "cached":
                return
            encoding = await self._encode(key, item)
            del item
            place.leave()
            recorder.spans.append(Span("encode", recorder.instance, encoding.start_s, encoding.end_s))
            await self._deliver(key, handoff, encoding, recorder)
        finally:
            if place is not None:
                place.leave()
            self._handoffs.close(key)
            if self._computing.pop(key, None) is not None:
                self._thread.submit(lambda engine: engine.cancel(key))

    def settle(self, outcomes: list[EncodingOutcome]) -> None:
        """The engine has finished a batch. Outputs of items that have gone meanwhile are dropped."""
        for key, outcome in outcomes:
            waiting = self._computing.pop(key, None)
            if waiting is None or waiting.done():
                continue
            if isinstance(outcome, TriptychError):
                waiting.set_exception(outcome)
            else:
                waiting.set_result(outcome)

    async def _preprocess(self, key: Key, message: Encode, recorder: SpanRecorder) -> ProcessedInput:
        item = await self._pool.process(message.kind, message.media)
        recorder.end("preprocess")
        self._links.hops.mark(key, "preprocessed")
        return item

    async def _offer(self, message: Encode, item: ProcessedInput, recorder: SpanRecorder) -> Handoff:
        offer = Offer(
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
            sender_epoch=self._links.epoch,
            deadline_s=min(message.deadline_s, time.time() + self._links.settings.handoff_timeout_s),
        )
        recorder.start("grant")
        handoff = await self._handoffs.offer(offer, await self._receiver(message.destination))
        recorder.end("grant")
        return handoff

    async def _receiver(self, instance_id: str) -> InstanceRecord | None:
        """Who gets the output; None if it is not registered. Raises TriptychError("unavailable") without a broker."""
        try:
            return self._handoffs.lately_seen(instance_id) or await self._links.registry.get(instance_id)
        except RedisError as error:
            message = f"the broker does not answer, and {instance_id} cannot be looked up: {error}"
            raise TriptychError("unavailable", message) from error

    async def _encode(self, key: Key, item: ProcessedInput) -> Encoding:
        done: asyncio.Future[Encoding] = asyncio.get_running_loop().create_future()
        self._computing[key] = done
        self._thread.submit(lambda engine: engine.submit(key, item))
        encoding = await done
        self._links.hops.mark(key, "encode_start", encoding.start_s)
        self._links.hops.mark(key, "encode_done", encoding.end_s)
        return encoding

    async def _deliver(self, key: Key, handoff: Handoff, encoding: Encoding, recorder: SpanRecorder) -> None:
        recorder.start("handoff")
        await self._handoffs.deliver(handoff, encoding.shape, encoding.dtype, encoding.data)
        recorder.end("handoff")
        for moment, at_s in handoff.times_s.items():
            self._links.hops.mark(key, moment, at_s)
        for start, end in (("offer_sent", "grant_received"), ("tensor_sent", "receipt_received")):
            elapsed_s = self._links.hops.elapsed_s(key, start, end)
            if elapsed_s is not None:
                self._links.metrics.hop_seconds.labels(f"{start}_to_{end}").observe(elapsed_s)

    @contextmanager
    def _holding(self, num_bytes: int) -> Iterator[None]:
        self._media_bytes += num_bytes
        try:
            yield
        finally:
            self._media_bytes -= num_bytes


def _outcome_of(result: EncoderResult) -> Encoding | TriptychError:
    if result.tensor is None:
        error = result.error
        return TriptychError(error.code, error.message) if error else TriptychError("internal_error", "no output")
    tensor = result.tensor.detach().contiguous().cpu()
    as_bytes: Any = tensor.view(-1).view(torch.uint8).numpy()  # bytes, whatever the dtype: numpy knows no bf16
    data = memoryview(as_bytes)
    return Encoding(list(tensor.shape), str(tensor.dtype).removeprefix("torch."), data, result.start_s, result.end_s)
