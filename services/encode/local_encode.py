"""The encode stage of a worker with a decoder: by its role, or as a fallback while the cluster has no encoder. Tensors
do not travel: see `LocalSink`."""

from __future__ import annotations

from common.messages import Encode
from engine.core.decoder_engine import DecoderEngine
from engine.core.encoder_engine import EncoderEngine
from engine.device.choice import choose_device
from engine.device.memory import ENCODER_SHARE
from engine.state.events import Event
from services.encode.encode_stage import EncodeStage
from services.encode.local_sink import LocalSink
from services.handoff.device_tensors import compute_on_own_stream
from services.process.engine_thread import EngineThread
from services.worker_context import WorkerContext


class LocalEncodeStage(EncodeStage):
    """Encodes for the decoder of `thread`. With `is_fallback`, items are counted as fallbacks.

    Computes on a CUDA stream of its own: decode steps run beside a batch of images, not behind it.
    """

    def __init__(self, links: WorkerContext, thread: EngineThread[DecoderEngine, Event], is_fallback: bool) -> None:
        self.sink = LocalSink(thread)
        super().__init__(links, self.sink, prepare=lambda tensor: tensor, memory_share=ENCODER_SHARE)
        self._num_fallbacks = 0
        self._is_fallback = is_fallback
        links.metrics.gauges["encoder_fallbacks_total"] = lambda: self._num_fallbacks
        links.metrics.gauges["inputs_encoding_here"] = lambda: self.sink.num_open

    def submit(self, proxy: bytes, message: Encode) -> None:
        self._num_fallbacks += self._is_fallback
        super().submit(proxy, message)

    def _build(self, output_cache_bytes: int, memory_share: float) -> EncoderEngine:
        """Build on the engine's thread, after setting a new stream: weights are loaded on the same stream."""
        compute_on_own_stream(choose_device(self._links.engine_config.device))
        return super()._build(output_cache_bytes, memory_share)
