"""The life of one item on its way through an encoder: preprocess -> offer -> grant -> encode -> deliver -> receipt.

Where the output of equal content has been kept, it is: offer -> grant -> deliver -> receipt. Where an earlier attempt
has got so far that something is made of it already, that is not made again: see services.encode.encode_work.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from broker.handoff.sender import Key
from common.errors import TriptychError
from common.messages import Encode, Span
from common.telemetry import SpanRecorder
from engine.cache.output_cache import OutputCache
from engine.core.encoder_engine import EncoderEngine, EncoderResult
from engine.device.memory import staging_budget
from engine.scheduler.encoder import EncoderKey
from services.encode.encode_dedup import EncodeDedup, Encoding, EncodingOutcome
from services.encode.encode_work import EncodeWork, PreprocessQueue
from services.encode.memory_gate import MemoryGate
from services.encode.output_sink import OutputSink
from services.encode.preprocess_pool import PreprocessPool
from services.process.engine_thread import EngineThread
from services.worker_context import WorkerContext


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


class EncodeJob:
    """Takes one item after another through its life; `run` per item, as many at once as there are."""

    def __init__(
        self,
        links: WorkerContext,
        pool: PreprocessPool,
        thread: EngineThread[EncoderEngine, EncodingOutcome],
        destination: OutputSink,
        outputs: OutputCache,
    ) -> None:
        self._links = links
        self._pool = pool
        self._destination = destination
        self._outputs = outputs
        self.encoding = EncodeDedup(thread, outputs)
        # Preprocessed arrays that may wait for grants. Items that find no room wait with their media only.
        self.staging_bytes = staging_budget(links.settings.engine)
        self._preparation = PreprocessQueue(pool, MemoryGate(self.staging_bytes, links.settings.preprocess_workers))

    @property
    def held_bytes(self) -> int:
        """Media and preprocessed arrays of all items under way, and outputs that wait to be delivered."""
        return self._preparation.held_bytes + self._preparation.room.held_bytes + self._preparation.computed_bytes

    @property
    def is_crowded(self) -> bool:
        """Whether items wait for memory to be preprocessed into."""
        return self._preparation.room.num_waiting > 0

    @property
    def num_waiting(self) -> int:
        """Items that wait for memory or for a process to preprocess them."""
        return self._preparation.room.num_waiting + self._pool.num_waiting

    def begin(self, message: Encode) -> EncodeWork:
        """Begin with an item, which is preprocessed as soon as there is room; to be dropped in the end."""
        return EncodeWork(message, self._preparation, self.encoding, self._outputs)

    async def run(self, key: Key, message: Encode, work: EncodeWork, recorder: SpanRecorder) -> None:
        """Return once the input is in place at its destination. Media in `message` are not looked at.

        However this ends, cancellation included, nothing of this attempt is left in handoffs.
        Raises TriptychError saying why the input is not in place.
        """
        try:
            if not work.is_prepared:
                await self._prepare(key, work, recorder)
            recorder.start("grant")
            wanted = await self._destination.offer(key, message, work.item)
            recorder.end("grant")
            if not wanted:
                return
            tensor = await self._encode(key, work, recorder) if work.kept is None else work.kept
            recorder.start("handoff")
            await self._destination.deliver(key, tensor)
            recorder.end("handoff")
        finally:
            self._destination.close(key)

    async def _prepare(self, key: Key, work: EncodeWork, recorder: SpanRecorder) -> None:
        recorder.start("preprocess")
        await work.prepared()
        recorder.end("preprocess")
        self._links.hops.mark(key, "preprocessed")

    async def _encode(self, key: Key, work: EncodeWork, recorder: SpanRecorder) -> torch.Tensor:
        encoding = await work.computed(key, lambda: self._destination.early(key))
        self._links.hops.mark(key, "encode_start", encoding.start_s)
        self._links.hops.mark(key, "encode_done", encoding.end_s)
        recorder.spans.append(Span("encode", recorder.instance, encoding.start_s, encoding.end_s))
        return encoding.tensor
