"""How the workers of one host share its memory.

What is available is looked up once, before any worker has taken some, so that shares do not depend on who starts first
and a worker that is started again gets what it had.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Final

from common.errors import TriptychError
from common.host_memory import available_memory
from launch.topology import Topology

if TYPE_CHECKING:
    from common.config import EngineConfig
    from common.model_info import ModelInfo

CPU_FRACTION: Final = 0.5
GPU_FRACTION: Final = 0.9
_SHARE: Final = {"prefill_decode": 3, "encoder": 1}
"""A decoder's pools grow with what there is; an encoder needs no more than its largest batch takes."""
_FLOAT32_BYTES: Final = 4
_HALF_BYTES: Final = 2
_MAX_HEADER_BYTES: Final = 100 * 2**20


def split_memory(
    engine: EngineConfig, topology: Topology, info: ModelInfo, available: int | None = None
) -> dict[str, dict[str, float | int]]:
    """Engine settings of each role: its share of the machine's memory, or of the GPU that all workers are on.

    Nothing where the user has said what a worker may take. `available` is the machine's free memory in bytes. Raises
    TriptychError("invalid_request") where the weights alone are more than that.
    """
    if engine.memory_bytes is not None:
        return {role: {} for role in _SHARE}
    counts = {"encoder": topology.encoders, "prefill_decode": topology.prefill_decodes}
    shares = sum(_SHARE[role] * count for role, count in counts.items())
    parts = {role: share / shares for role, share in _SHARE.items()}
    if _runs_on_gpu(engine):
        fraction = engine.memory_fraction or GPU_FRACTION
        return {role: {"memory_fraction": fraction * part} for role, part in parts.items()}
    there = available_memory() if available is None else available
    # Encoders hold one part of the weights, decoders the other; which tensors are whose, only the workers know.
    weights = weight_bytes(info, engine)
    at_least, at_most = (weights * limit(filter(None, counts.values())) for limit in (min, max))
    if at_least >= there:
        message = (
            f"the weights of {info.name} take {at_least / 2**30:.3g} GiB as {topology}, this machine has "
            f"{there / 2**30:.3g} GiB free: use fewer instances, --dtype bfloat16 or a smaller model"
        )
        raise TriptychError("invalid_request", message, "topology")
    budget = (engine.memory_fraction or CPU_FRACTION) * max(there - at_most, (there - at_least) // 4)
    return {role: {"memory_bytes": max(1, int(budget * part))} for role, part in parts.items()}


def weight_bytes(info: ModelInfo, engine: EngineConfig) -> int:
    """What all weights of a model take once they are loaded on a CPU; an encoder and a decoder have one part each."""
    item_bytes = _FLOAT32_BYTES if engine.dtype in ("auto", "float32") else _HALF_BYTES
    return item_bytes * sum(map(_count_parameters, info.folder.glob("*.safetensors")))


def _count_parameters(path: Path) -> int:
    """By the header of a safetensors file; 0 for one that is damaged, which the workers report."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, _MAX_HEADER_BYTES)))
        return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0


def _runs_on_gpu(engine: EngineConfig) -> bool:
    """As the workers will find, without importing torch here: a wrong guess costs the even split, nothing else."""
    return engine.device == "cuda" or (engine.device == "auto" and Path("/proc/driver/nvidia/gpus").is_dir())
