"""The encode stage of a worker with a decoder: by its role, or as a fallback while the cluster has no encoder.

The decoder's engine decides, as in every handoff. Channels and transports are left out, and nothing is copied.
"""

from __future__ import annotations

import asyncio

import torch

from broker.handoff.sender import Key
from common.errors import ErrorInfo, TriptychError
from common.messages import Encode, Grant, Receipt
from engine.core.decoder_engine import DecoderEngine
from engine.core.encoder_engine import EncoderEngine
from engine.device.choice import choose_device
from engine.device.memory import ENCODER_SHARE
from engine.processors import ProcessedInput
from engine.state.events import Event
from services.encode.encode_stage import EncodeStage
from services.encode.output_sink import offer_of
from services.handoff.payloads import compute_on_own_stream, keep_for_this_stream
from services.process.engine_thread import EngineThread
from services.worker_context import WorkerContext


class LocalEncodeStage(EncodeStage):
    """Encodes for the decoder of `thread`. With `is_fallback`, items are counted as fallbacks.

    Computes on a CUDA stream of its own: decode steps run beside a batch of images, not behind it.
    """

    def __init__(self, context: WorkerContext, thread: EngineThread[DecoderEngine, Event], is_fallback: bool) -> None:
        self.sink = LocalSink(thread)
        super().__init__(context, self.sink, prepare=lambda tensor: tensor, memory_share=ENCODER_SHARE)
        self._num_fallbacks = 0
        self._is_fallback = is_fallback
        context.metrics.gauges["encoder_fallbacks_total"] = lambda: self._num_fallbacks
        context.metrics.gauges["inputs_encoding_here"] = lambda: self.sink.num_open

    def submit(self, proxy: bytes, message: Encode) -> None:
        self._num_fallbacks += self._is_fallback
        super().submit(proxy, message)

    def _build(self, cache_bytes: int, memory_share: float) -> EncoderEngine:
        """Build on the engine's thread, after setting a new stream: weights are loaded on the same stream."""
        compute_on_own_stream(choose_device(self._context.engine_config.device))
        return super()._build(cache_bytes, memory_share)


class LocalSink:
    """An `OutputSink`: the decoder of `thread`."""

    def __init__(self, thread: EngineThread[DecoderEngine, Event]) -> None:
        self._thread = thread
        self._answers: dict[Key, asyncio.Queue[Grant | Receipt]] = {}

    @property
    def num_open(self) -> int:
        return len(self._answers)

    async def offer(self, key: Key, message: Encode, item: ProcessedInput) -> bool:
        answers = self._answers[key] = asyncio.Queue()
        offer = offer_of(message, item, "", message.deadline_s)
        self._thread.submit(lambda engine: engine.offer(offer))
        match await answers.get():
            case Grant(status="granted"):
                return True
            case Grant(status="cached"):
                del self._answers[key]
                return False
            case Grant(error=ErrorInfo() as error):
                raise TriptychError(error.code, error.message, error.param)
            case _:
                raise _revoked(key)

    async def deliver(self, key: Key, tensor: torch.Tensor) -> None:
        answers = self._answers[key]

        def store(engine: DecoderEngine) -> None:
            keep_for_this_stream(tensor)  # computed on the encoder's stream
            engine.deliver(*key, tensor)

        if answers.empty():  # else the grant was revoked during the computation
            self._thread.submit(store)
        match await answers.get():
            case Receipt(status="stored"):
                del self._answers[key]
                return
            case Receipt(status=status):
                raise TriptychError("unavailable", f"input {key[1]} was not stored: {status}")
            case _:
                raise _revoked(key)

    def early(self, key: Key) -> None:
        """Return None: the tensor stays in this process."""

    def close(self, key: Key) -> None:
        if self._answers.pop(key, None) is not None:
            self._thread.submit(lambda engine: engine.withdraw(*key))

    def settle(self, event: Grant | Receipt) -> bool:
        """Accept an event of the engine; False for an event about another input."""
        answers = self._answers.get((event.request_id, event.input_id, event.attempt))
        if answers is None:
            return False
        answers.put_nowait(event)
        return True


def _revoked(key: Key) -> TriptychError:
    return TriptychError("unavailable", f"the room for input {key[1]} was taken back")
