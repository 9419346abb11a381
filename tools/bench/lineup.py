"""The systems that are compared over one checkpoint: on one device and in one dtype, all there at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import torch

from common.config import Device
from common.errors import TriptychError
from engine.device.choice import DTYPES, choose_device, choose_dtype
from launch.cluster.cpus import available_cores
from tools.bench.with_cluster import ClusterSystem
from tools.bench.with_llm import LLMSystem
from tools.bench.with_transformers import TransformersSystem
from tools.bench.workloads import Workload

LLM_SHARE, CLUSTER_SHARE = 0.25, 0.4
"""Of a GPU's memory; the rest is transformers'."""


@contextmanager
def lineup(
    workload: Workload,
    dtype: str = "auto",
    device: Device = "auto",
    topology: str | None = None,
    cluster: ClusterSystem | None = None,
) -> Iterator[tuple[TransformersSystem, LLMSystem, ClusterSystem]]:
    """transformers' generate, `LLM` and a cluster for the length of a `with` block. `dtype` auto is what the engine
    would choose on this device, for transformers, too. A `cluster` that is there already is left running.

    Raises TriptychError("invalid_request") for a dtype that there is not.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise TriptychError("invalid_request", f"dtype {dtype!r} is not one of auto, {', '.join(DTYPES)}", "dtype")
    where, cores, info = choose_device(device), available_cores(), workload.info
    chosen = DTYPES[dtype] if dtype != "auto" else choose_dtype("auto", where, info)
    name = str(chosen).removeprefix("torch.")
    with (
        closing(TransformersSystem(info, chosen, cores, where.type)) as theirs,
        closing(LLMSystem(info, name, cores, **share_of(where, LLM_SHARE))) as llm,
        ExitStack() as stack,
    ):
        if cluster is None:
            cluster = stack.enter_context(closing(ClusterSystem(info, name, topology, **share_of(where))))
        yield theirs, llm, cluster


def share_of(device: torch.device, fraction: float = CLUSTER_SHARE) -> dict[str, Any]:
    """Fields of EngineConfig: the device and, of a GPU, a part of its memory."""
    return {"device": device.type, **({"memory_fraction": fraction} if device.type == "cuda" else {})}
