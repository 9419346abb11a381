"""Shares of a host's cores and memory, or of a GPU's memory, for the workers.

The available memory is looked up once, before any worker has taken some: shares do not depend on who starts first, and
a restarted worker gets the same share. On a GPU an encoder gets the needed amount, decoders the rest:

    memory_fraction (0.9) x the GPU
    | encoder: weights + largest batch + context | ... | decoder: weights + step + context + KV cache          |
                                                       |<- 2 parts of a prefill worker, 3 of one that decodes ->|

Shares of a GPU are fractions of the whole device, as `--memory-fraction` is: each worker keeps to its own.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from common.errors import invalid
from common.messages import Role
from common.model_info import ModelInfo
from common.process.gpu_memory import GPU_FRACTION, process_bytes, total_gpu_memory
from common.process.host_memory import available_memory
from engine.models.checkpoint_index import TensorEntry, read_index
from launch.cluster.topology import Topology

if TYPE_CHECKING:
    from common.config import EngineConfig

CPU_FRACTION: Final = 0.5
"""Share of the free memory for all workers together."""
_DECODER_SHARE: Final[dict[Role, int]] = {"prefill": 2, "decode": 3, "prefill_decode": 3, "encode_prefill_decode": 4}
"""A prefill worker keeps a request only until its keys and values are handed over."""
_THREAD_SHARE: Final[dict[Role, int]] = {"encoder": 1, **dict.fromkeys(_DECODER_SHARE, 2), "encode_prefill_decode": 3}
_CPU_SHARE: Final[dict[Role, int]] = {"encoder": 1, **_DECODER_SHARE}
"""A decoder's pools grow with the memory; an encoder needs no more than its largest batch takes."""
BATCH_BYTES: Final = 2 * 2**30
"""GPU memory for an encoder's largest batch; where that is more, the worker makes batches smaller."""
UNKNOWN_SHARE: Final = 0.15
"""An encoder's part of a GPU whose size cannot be looked up."""
MAX_ENCODERS: Final = 0.5
"""Part of a GPU for all encoders together, at most."""
_OF_AN_ENCODER: Final = re.compile(
    r"(^|\.)(encoder|visual|vision_tower|vision_model|audio_tower|multi_modal_projector|connector)\."
)
_EMBEDDING: Final = re.compile(r"(^|\.)(embed_tokens|shared|embed_positions)\.weight$")
_HEAD: Final = re.compile(r"(^|\.)(lm_head|proj_out)\.weight$")
"""Names in the families' checkpoints. Which tensors are whose, only the workers know for certain."""


def available_cores(cgroup: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the usable cores: the process's affinity, lowered by a container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    try:
        quota, period = cgroup.read_text().split()
        cores = min(cores, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        pass  # no cgroup v2 here, or no quota ("max")
    return max(1, cores)


def split_threads(topology: Topology, cores: int) -> dict[Role, int]:
    """Return the CPU threads of a worker of each role. Decoders work all the time and get two shares, encoders a single
    share.

    At least one each; together no more than the cores, where there are enough.
    """
    shares = sum(share * topology.count(role) for role, share in _THREAD_SHARE.items())
    return {role: max(1, cores * share // shares) for role, share in _THREAD_SHARE.items()}


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
        return {role: {} for role in _CPU_SHARE}
    if runs_on_gpu(engine):
        return split_gpu(engine, topology, info)
    there = available_memory() if available is None else available
    # An encoder loads one part of the weights, a decoder the other; the size of each is not known here.
    weights = sum(weight_bytes(info, engine, 4 if engine.dtype in ("auto", "float32") else 2))
    prefilling, both = topology.prefill + topology.prefill_decode, topology.encode_prefill_decode
    encoders = topology.encoder + both + prefilling * (encoder_fallback and info.media_kind is not None)
    copies = [count for count in (encoders, prefilling + topology.decode + both) if count]
    at_least, at_most = weights * min(copies), weights * max(copies)
    if at_least >= there:
        message = (
            f"the weights of {info.name} take {at_least / 2**30:.3g} GiB as {topology}, this machine has "
            f"{there / 2**30:.3g} GiB free: use fewer instances, --dtype bfloat16 or a smaller model"
        )
        raise invalid(message, "topology")
    budget = (engine.memory_fraction or CPU_FRACTION) * max(there - at_most, (there - at_least) // 4)
    parts = sum(part * topology.count(role) for role, part in _CPU_SHARE.items())
    return {role: {"memory_bytes": max(1, int(budget * (part / parts)))} for role, part in _CPU_SHARE.items()}


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
    encoder, rest = weight_bytes(info, engine, item_bytes)
    most = fraction * MAX_ENCODERS / max(1, topology.encoder)
    kept = engine.encoder_output_cache_bytes or 0  # the usual outputs lie within what is there for a batch
    needed = UNKNOWN_SHARE if total is None else (process_bytes(engine) + encoder + BATCH_BYTES + kept) / total
    of_encoder = min(most, needed)
    left = fraction - topology.encoder * of_encoder
    parts = sum(part * topology.count(role) for role, part in _DECODER_SHARE.items())
    fractions: dict[Role, float] = {"encoder": of_encoder}
    fractions |= {role: left * part / parts for role, part in _DECODER_SHARE.items()}
    weights: dict[Role, int] = dict.fromkeys(_DECODER_SHARE, rest)
    weights |= {"encoder": encoder, "encode_prefill_decode": encoder + rest}
    for role, share in fractions.items():
        taken = weights[role] + process_bytes(engine)
        if total is not None and topology.count(role) and taken >= share * total:
            message = (
                f"as {topology}, each {role} worker gets {share:.2f} of the GPU's {total / 2**30:.3g} GiB, and its "
                f"weights of {info.name} and CUDA itself take {taken / 2**30:.3g} GiB: use fewer instances, "
                f"another GPU for some of them, --dtype bfloat16 or a smaller model"
            )
            raise invalid(message, "topology")
    return {role: {"memory_fraction": int(1e4 * share) / 1e4} for role, share in fractions.items()}


def runs_on_gpu(engine: EngineConfig) -> bool:
    """Return whether the workers likely run on a GPU, without importing torch: a wrong guess costs the even split."""
    return engine.device == "cuda" or (engine.device == "auto" and Path("/proc/driver/nvidia/gpus").is_dir())


def weight_bytes(info: ModelInfo, engine: EngineConfig, item_bytes: int) -> tuple[int, int]:
    """Return the bytes of the weights of the encoder and of the rest, `item_bytes` for each parameter in full.

    Told by the names and dtypes in the headers of the checkpoint's files. With the load format "dummy" no file is read:
    the models are built without memory, and importing torch takes seconds. With 8-bit weights, matrices of the rest
    take a byte for each parameter, and the embedding that much more where it is the head, too. Raises CheckpointError
    for missing, damaged or cut files.
    """
    small = engine.quantization == "int8"
    if engine.load_format == "dummy":
        from engine.models.registry import make_decoder, make_encoder

        built = make_encoder(info).module.parameters() if info.media_kind is not None else ()
        of_encoder = item_bytes * sum(one.numel() for one in built)
        parameters = [(name, tuple(one.shape)) for name, one in make_decoder(info).named_parameters()]
    else:
        entries = read_index(info.folder)
        of_encoder = sum(_held(one, item_bytes) for name, one in entries.items() if _OF_AN_ENCODER.search(name))
        rest = {name: one for name, one in entries.items() if not _OF_AN_ENCODER.search(name)}
        if not small:
            return of_encoder, sum(_held(one, item_bytes) for one in rest.values())
        parameters = [(name, one.shape) for name, one in rest.items()]
    total, has_head = 0, any(_HEAD.search(name) for name, _ in parameters)
    for name, shape in parameters:
        is_embedding = bool(_EMBEDDING.search(name))
        each = 1 if small and len(shape) == 2 and not is_embedding else item_bytes
        total += math.prod(shape) * (each + (small and is_embedding and not has_head))
    return of_encoder, total


def _held(entry: TensorEntry, item_bytes: int) -> int:
    """Return the bytes of a tensor once it is loaded: small dtypes are kept."""
    is_small = entry.dtype not in ("F64", "F32", "F16", "BF16")
    return entry.size_bytes if is_small else math.prod(entry.shape) * item_bytes
