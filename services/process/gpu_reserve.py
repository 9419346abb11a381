"""GPU memory outside torch's allocator: a worker knows its transports, the engine does not."""

from __future__ import annotations

from broker.transports.factory import gpu_bytes_of_nixl
from common.config import EngineConfig, Settings
from common.process.gpu_memory import PROCESS_BYTES


def engine_on_gpu(settings: Settings, host: str) -> EngineConfig:
    """Return the engine's settings for a GPU worker on `host`, a numeric address; NIXL's memory is left to NIXL."""
    engine = settings.engine
    if engine.process_bytes is not None:
        return engine
    return engine.model_copy(update={"process_bytes": PROCESS_BYTES + gpu_bytes_of_nixl(settings.transport, host)})
