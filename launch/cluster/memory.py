"""Shares of a host's memory, or of the GPU's (launch.cluster.gpu_split), for the workers.

What is available is looked up once, before any worker has taken some, so that shares do not depend on who starts first
and a worker that is started again gets what it had.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from common.errors import TriptychError
from common.messages import Role
from common.process.host_memory import available_memory
from launch.cluster.gpu_split import split_gpu
from launch.cluster.topology import Topology
from launch.cluster.weights import count_parameters

if TYPE_CHECKING:
    from common.config import EngineConfig
    from common.model_info import ModelInfo

CPU_FRACTION: Final = 0.5
_SHARE: Final[dict[Role, int]] = {
    "encoder": 1,
    "prefill": 2,
    "decode": 3,
    "prefill_decode": 3,
    "encode_prefill_decode": 4,
}
"""A decoder's pools grow with what there is; an encoder needs no more than its largest batch takes, and a prefill
worker keeps a request only until its keys and values are handed over."""
_FLOAT32_BYTES: Final = 4
_HALF_BYTES: Final = 2


def split_memory(
    engine: EngineConfig,
    topology: Topology,
    info: ModelInfo,
    available: int | None = None,
    *,
    encoder_fallback: bool = False,
) -> dict[Role, dict[str, float | int]]:
    """Return engine settings for each role: the share of the machine's memory, or of a GPU common to all workers.

    Nothing where the user has said what a worker may take. `available` is the machine's free memory in bytes. With
    `encoder_fallback`, workers that prefill have an encoder, too. Raises TriptychError("invalid_request") where the
    weights alone are more than that.
    """
    if engine.memory_bytes is not None:
        return {role: {} for role in _SHARE}
    if runs_on_gpu(engine):
        return split_gpu(engine, topology, info)
    shares = sum(share * topology.count(role) for role, share in _SHARE.items())
    parts = {role: share / shares for role, share in _SHARE.items()}
    there = available_memory() if available is None else available
    # An encoder has one part of the weights, a decoder the other; which tensors are whose, only the workers know.
    weights = weight_bytes(info, engine)
    copies = [count for count in _copies(topology, encoder_fallback and info.media_kind is not None) if count]
    at_least, at_most = weights * min(copies), weights * max(copies)
    if at_least >= there:
        message = (
            f"the weights of {info.name} take {at_least / 2**30:.3g} GiB as {topology}, this machine has "
            f"{there / 2**30:.3g} GiB free: use fewer instances, --dtype bfloat16 or a smaller model"
        )
        raise TriptychError("invalid_request", message, "topology")
    budget = (engine.memory_fraction or CPU_FRACTION) * max(there - at_most, (there - at_least) // 4)
    return {role: {"memory_bytes": max(1, int(budget * part))} for role, part in parts.items()}


def _copies(topology: Topology, encoder_fallback: bool) -> tuple[int, int]:
    """How often the encoder's weights are loaded, and how often the decoder's."""
    prefilling = topology.prefill + topology.prefill_decode
    both = topology.encode_prefill_decode
    return topology.encoder + both + prefilling * encoder_fallback, prefilling + topology.decode + both


def weight_bytes(info: ModelInfo, engine: EngineConfig) -> int:
    """Return the bytes of all weights of a model loaded on a CPU; encoder and decoder hold a part each."""
    item_bytes = _FLOAT32_BYTES if engine.dtype in ("auto", "float32") else _HALF_BYTES
    return item_bytes * sum(count_parameters(info, engine.load_format))


def runs_on_gpu(engine: EngineConfig) -> bool:
    """Return whether the workers likely run on a GPU, without importing torch: a wrong guess costs the even split."""
    return engine.device == "cuda" or (engine.device == "auto" and Path("/proc/driver/nvidia/gpus").is_dir())
