"""How much of a GPU a worker leaves to what is not torch's: its transports are known here, and not to its engine."""

from __future__ import annotations

from broker.transports.factory import gpu_bytes_of_nixl
from common.config import EngineConfig, Settings
from common.process.gpu_memory import PROCESS_BYTES


def engine_on_gpu(settings: Settings, host: str) -> EngineConfig:
    """The engine's settings for a worker on a GPU that listens on `host`, a numeric address.

    They leave room for what tensors between GPUs take by NIXL where the transport stands for that, unless the user has
    said how much a process takes.
    """
    engine = settings.engine
    if engine.process_bytes is not None:
        return engine
    return engine.model_copy(update={"process_bytes": PROCESS_BYTES + gpu_bytes_of_nixl(settings.transport, host)})
