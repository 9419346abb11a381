"""Shares of a GPU's memory: an encoder gets the needed amount, decoders the rest.

    memory_fraction (0.9) x the GPU
    | encoder: weights + largest batch + context | ... | decoder: weights + step + context + KV cache          |
                                                       |<- 2 parts of a prefill worker, 3 of one that decodes ->|

Shares are fractions of the whole device, as `--memory-fraction` is: each worker keeps to its own, whoever starts first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from common.errors import TriptychError
from common.messages import Role
from common.process.gpu_memory import GPU_FRACTION, process_bytes, total_gpu_memory
from launch.cluster.topology import Topology
from launch.cluster.weights import count_parameters

if TYPE_CHECKING:
    from common.config import EngineConfig
    from common.model_info import ModelInfo

_SHARE: Final[dict[Role, int]] = {"prefill": 2, "decode": 3, "prefill_decode": 3, "encode_prefill_decode": 4}
"""Of what encoders leave. A prefill worker keeps a request only until its keys and values are handed over."""
BATCH_BYTES: Final = 2 * 2**30
"""For an encoder's largest batch; where that is more, the worker makes batches smaller."""
UNKNOWN_SHARE: Final = 0.15
"""An encoder's part of a GPU whose size cannot be looked up."""
MAX_ENCODERS: Final = 0.5
"""All encoders together get at most this part."""


def split_gpu(
    engine: EngineConfig, topology: Topology, info: ModelInfo, total: int | None = None
) -> dict[Role, dict[str, float | int]]:
    """Return the GPU fraction of a worker of each role; all workers together stay within `memory_fraction`.

    `total` is the GPU's memory in bytes, looked up if not given. Raises TriptychError("invalid_request") with the
    numbers where a worker's weights do not fit its share.
    """
    total = total or total_gpu_memory()
    fraction = engine.memory_fraction or GPU_FRACTION
    item_bytes = 4 if engine.dtype == "float32" else 2
    encoder, rest = (item_bytes * count for count in count_parameters(info, engine.load_format))
    most = fraction * MAX_ENCODERS / max(1, topology.encoder)
    kept = engine.encoder_output_cache_bytes or 0  # the usual outputs lie within what is there for a batch
    needed = UNKNOWN_SHARE if total is None else (process_bytes(engine) + encoder + BATCH_BYTES + kept) / total
    of_encoder = min(most, needed)
    left = fraction - topology.encoder * of_encoder
    parts = sum(part * topology.count(role) for role, part in _SHARE.items())
    fractions: dict[Role, float] = {"encoder": of_encoder}
    fractions |= {role: left * part / parts for role, part in _SHARE.items()}
    if total is not None:
        weights: dict[Role, int] = dict.fromkeys(_SHARE, rest)
        weights |= {"encoder": encoder, "encode_prefill_decode": encoder + rest}
        _check(topology, info, total, fractions, {role: size + process_bytes(engine) for role, size in weights.items()})
    return {role: {"memory_fraction": int(1e4 * share) / 1e4} for role, share in fractions.items()}


def _check(
    topology: Topology, info: ModelInfo, total: int, fractions: dict[Role, float], needed: dict[Role, int]
) -> None:
    for role, fraction in fractions.items():
        if topology.count(role) and needed[role] >= fraction * total:
            message = (
                f"as {topology}, each {role} worker gets {fraction:.2f} of the GPU's {total / 2**30:.3g} GiB, and its "
                f"weights of {info.name} and CUDA itself take {needed[role] / 2**30:.3g} GiB: use fewer instances, "
                f"another GPU for some of them, --dtype bfloat16 or a smaller model"
            )
            raise TriptychError("invalid_request", message, "topology")
