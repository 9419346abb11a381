"""The life of one item on its way through an encoder: preprocess -> offer -> grant -> encode -> deliver -> receipt.

Where the output of equal content has been kept, it is: offer -> grant -> deliver -> receipt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import torch

from broker.handoff import Key
from common.errors import TriptychError
from common.messages import Encode, Span
from common.telemetry import SpanRecorder
from engine.cache.output_cache import OutputCache
from engine.encoder_engine import EncoderEngine, EncoderResult
from engine.memory import staging_budget
from engine.processors import ProcessedInput
from engine.scheduler.encoder import EncoderKey
from services.destination import Destination
from services.engine_thread import EngineThread
from services.links import Links
from services.preprocess import PreprocessPool
from services.room import Place, Room
from services.shared_encoding import Encoding, EncodingOutcome, SharedEncoding


def encode_step(
    engine: EncoderEngine,
    to: Callable[[torch.Tensor], torch.Tensor],
    leave: Callable[[EncoderKey, torch.Tensor], None],
) -> list[EncodingOutcome]:
    """One step of the engine, on its thread; the outputs leave it as `to` makes them; `leave` hears of them first."""
    outcomes: list[EncodingOutcome] = []
    for result in engine.step():
        outcome = _outcome_of(result, to)
        if isinstance(outcome, Encoding):
            leave(result.key, outcome.tensor)
        outcomes.append((result.key, outcome))
    return outcomes


def _outcome_of(result: EncoderResult, to: Callable[[torch.Tensor], torch.Tensor]) -> Encoding | TriptychError:
    if result.tensor is not None:
        return Encoding(to(result.tensor), result.start_s, result.end_s)
    error = result.error
    return TriptychError(error.code, error.message) if error else TriptychError("internal_error", "no output")


class ItemPipeline:
    """Takes one item after another through its life; `run` per item, as many at once as there are."""

    def __init__(
        self,
        links: Links,
        pool: PreprocessPool,
        thread: EngineThread[EncoderEngine, EncodingOutcome],
        destination: Destination,
        outputs: OutputCache,
    ) -> None:
        self._links = links
        self._pool = pool
        self._destination = destination
        self._outputs = outputs
        self.encoding = SharedEncoding(thread, outputs)
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

    async def run(self, key: Key, message: Encode, recorder: SpanRecorder) -> None:
        """Return once the input is in place at its destination.

        However this ends, cancellation included, nothing of the item is left in handoffs or engine.
        Raises TriptychError saying why the input is not in place.
        """
        place: Place | None = None
        kept = self._outputs.lend(message.content_hash)
        try:
            if kept is None:
                with self._holding(len(message.media)):
                    recorder.start("preprocess")
                    place = await self._room.enter()
                    item = await self._preprocess(key, message, recorder)
                    place.weigh(sum(array.nbytes for array in item.arrays.values()))
            else:
                item = kept.item
            message = msgspec.structs.replace(message, media=b"")
            recorder.start("grant")
            wanted = await self._destination.offer(key, message, item)
            recorder.end("grant")
            if not wanted:
                return
            tensor = kept.tensor if kept else await self._encode(key, message.content_hash, item, recorder)
            del item
            if place is not None:
                place.leave()
            recorder.start("handoff")
            await self._destination.deliver(key, tensor)
            recorder.end("handoff")
        finally:
            if place is not None:
                place.leave()
            if kept is not None:
                self._outputs.give_back(message.content_hash)
            self._destination.close(key)

    async def _preprocess(self, key: Key, message: Encode, recorder: SpanRecorder) -> ProcessedInput:
        item = await self._pool.process(message.kind, message.media)
        recorder.end("preprocess")
        self._links.hops.mark(key, "preprocessed")
        return item

    async def _encode(self, key: Key, content_hash: str, item: ProcessedInput, recorder: SpanRecorder) -> torch.Tensor:
        encoding = await self.encoding.encode(key, content_hash, item, self._destination.early(key))
        self._links.hops.mark(key, "encode_start", encoding.start_s)
        self._links.hops.mark(key, "encode_done", encoding.end_s)
        recorder.spans.append(Span("encode", recorder.instance, encoding.start_s, encoding.end_s))
        return encoding.tensor

    @contextmanager
    def _holding(self, num_bytes: int) -> Iterator[None]:
        self._media_bytes += num_bytes
        try:
            yield
        finally:
            self._media_bytes -= num_bytes
