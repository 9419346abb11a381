"""The encode stage of a worker that encodes the inputs of its own requests itself.

Either that is its role, or its fallback while the cluster has no encoder. Nothing travels: see LocalSink.
"""

from __future__ import annotations

from common.messages import Encode
from engine.core.decoder_engine import DecoderEngine
from engine.core.encoder_engine import EncoderEngine
from engine.device.choice import choose_device
from engine.device.memory import ENCODER_SHARE
from engine.state.events import Event
from services.encode.encode_stage import EncodeStage
from services.encode.local_sink import InputEvent, LocalSink
from services.handoff.device_tensors import compute_on_own_stream
from services.process.engine_thread import EngineThread
from services.worker_context import WorkerContext


class LocalEncode:
    """Encodes for the decoder that `thread` drives. With `is_fallback`, what it does is counted as such."""

    def __init__(self, links: WorkerContext, thread: EngineThread[DecoderEngine, Event], is_fallback: bool) -> None:
        self._destination = LocalSink(thread)
        self._stage = _BesideDecoder(
            links, self._destination, prepare=lambda tensor: tensor, memory_share=ENCODER_SHARE
        )
        self.thread = self._stage.thread
        self._num_fallbacks = 0
        self._is_fallback = is_fallback
        links.metrics.gauges["encoder_fallbacks_total"] = lambda: self._num_fallbacks
        links.metrics.gauges["inputs_encoding_here"] = lambda: self._destination.num_open

    @property
    def taken_bytes(self) -> int:
        """What the encoder's engine takes beside its weights, once it is loaded."""
        return self._stage.taken_bytes

    async def start(self) -> None:
        await self._stage.start()

    def take(self, proxy: bytes, message: Encode) -> None:
        """Encode an item, whose destination is this instance."""
        self._num_fallbacks += self._is_fallback
        self._stage.take(proxy, message)

    def settle(self, event: InputEvent) -> bool:
        """Take an event of the decoder's engine; False if it is about an input that came from elsewhere."""
        return self._destination.settle(event)

    def abort(self, request_id: str) -> None:
        self._stage.abort(request_id)

    def close(self) -> None:
        self._stage.close()


class _BesideDecoder(EncodeStage):
    """Computes on a stream of its own: a decode step does not stand behind a batch of pictures, but runs beside it."""

    def _build(self, output_cache_bytes: int, memory_share: float) -> EncoderEngine:
        """On the engine's thread, of which this is the stream from now on: weights are loaded on it, too."""
        compute_on_own_stream(choose_device(self._links.engine_config.device))
        return super()._build(output_cache_bytes, memory_share)
