"""One item of one request on the path through an encoder: preprocessed and computed once for all attempts.

    preprocess -> offer -> grant -> encode -> deliver -> receipt    for an item of new content
                  offer -> grant -----------> deliver -> receipt    for an item whose output has been kept

An attempt ends at a deadline of the proxy. The products of an item outlive the attempt: the next attempt finds the item
queued, preprocessed, being computed, or computed.
"""

from __future__ import annotations

import asyncio

import torch

from broker.handoff.sender import Key, key_of
from common.messages import Encode, MediaKind, Span
from common.telemetry import SpanRecorder, get_logger
from engine.cache.encoder_cache import OutputCache
from engine.core.encoder_engine import EncoderResult
from engine.processors import ProcessedInput
from services.encode.encode_dedup import EncodeDedup
from services.encode.output_sink import OutputSink
from services.encode.preprocess_pool import PreprocessPool
from services.process.handoff_trace import HandoffTrace

log = get_logger()


class EncodeJob:
    """The products of one item in an encoder; `attempt` is the newest attempt. `discard` frees all memory."""

    def __init__(self, message: Encode, pool: PreprocessPool, dedup: EncodeDedup, outputs: OutputCache) -> None:
        """Begin to preprocess, unless `outputs` has the output of equal content."""
        self.attempt = message.attempt
        self.content_hash = message.content_hash
        self.held_bytes = 0
        """Media until the item is preprocessed, then the output; the arrays between are counted by the pool."""
        self._owner = message.request_id, message.input_id
        self._pool = pool
        self._dedup = dedup
        self._outputs = outputs
        self._preparing: asyncio.Task[None] | None = None
        self._computing: asyncio.Future[EncoderResult] | None = None
        self._kept = outputs.acquire(message.content_hash)
        self._item = None if self._kept is None else self._kept.item
        if self._kept is None:
            self.held_bytes = len(message.media)
            self._preparing = asyncio.create_task(self._prepare(message.kind, message.media))
            # A failure while no attempt waits is raised in the next attempt: asyncio need not warn.
            self._preparing.add_done_callback(lambda done: done.cancelled() or done.exception())

    @property
    def waits_with_arrays(self) -> bool:
        """Whether the item is preprocessed, and no receiver has granted memory for the output yet."""
        return self._item is not None and bool(self._item.arrays) and self._computing is None

    async def run(self, message: Encode, sink: OutputSink, trace: HandoffTrace, recorder: SpanRecorder) -> None:
        """Make one attempt: return once the output is in place at the destination. Ignores media in `message`.

        `sink` forgets the handoff at any end. Raises TriptychError if the output is not in place.
        """
        key = key_of(message)
        about = {"request": key[0], "input": key[1], "attempt": key[2]}
        try:
            if self._preparing is not None and self._item is None:
                recorder.start("preprocess")
                await asyncio.shield(self._preparing)
                recorder.end("preprocess")
                trace.mark(key, "preprocessed")
            assert self._item is not None
            recorder.start("grant")
            log.debug("item offered", to=message.destination, **about)
            is_wanted = await sink.offer(key, message, self._item)
            recorder.end("grant")
            log.debug("item granted" if is_wanted else "item cached by its receiver", **about)
            if not is_wanted:
                return
            if self._kept is not None:
                tensor = self._kept.tensor
            else:
                tensor = await self._compute(key, self._item, sink, trace, recorder)
            recorder.start("handoff")
            log.debug("output leaves", bytes=tensor.nbytes, **about)
            await sink.deliver(key, tensor)
            recorder.end("handoff")
            log.debug("output stored by its receiver", **about)
        finally:
            sink.close(key)

    def discard(self) -> None:
        """Free all memory; no attempt may follow."""
        if self._preparing is not None:
            self._preparing.cancel()
        if self._computing is not None:
            self._dedup.discard(self._owner, self.content_hash)
            self._computing.cancel()
        if self._kept is not None:
            self._outputs.release(self.content_hash)
        if self._item is not None:
            self._item = self._pool.release(self._item)

    async def _prepare(self, kind: MediaKind, media: bytes) -> None:
        try:
            self._item = await self._pool.process(kind, media)
        finally:
            self.held_bytes = 0

    async def _compute(
        self, key: Key, item: ProcessedInput, sink: OutputSink, trace: HandoffTrace, recorder: SpanRecorder
    ) -> torch.Tensor:
        """Return the output, computed from now on at the latest. Raises TriptychError for a failed computation.

        The engine's thread sends an output still to be computed at once, if `sink` has a path.
        """
        if self._computing is not None and self._computing.done():
            result = self._computing.result()
        else:
            send = sink.early(key)
            if self._computing is None:
                self._computing = self._dedup.join(self._owner, self.content_hash, item)
                self._computing.add_done_callback(self._end_computing)
            with self._dedup.sending_early(key, self.content_hash, send):
                result = await asyncio.shield(self._computing)
        trace.mark(key, "encode_start", result.start_s)
        trace.mark(key, "encode_done", result.end_s)
        recorder.spans.append(Span("encode", recorder.instance, result.start_s, result.end_s))
        assert result.tensor is not None
        return result.tensor

    def _end_computing(self, computing: asyncio.Future[EncoderResult]) -> None:
        if not computing.cancelled() and computing.exception() is None:
            tensor = computing.result().tensor
            assert tensor is not None
            self.held_bytes = tensor.nbytes
        assert self._item is not None
        self._item = self._pool.release(self._item)
