"""The systems that are compared over one checkpoint: on one device and in one dtype, all there at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from common.config import Device
from common.errors import TriptychError
from engine.device import DTYPES, choose_device, choose_dtype
from launch.bench.systems import System
from launch.bench.with_cluster import ClusterSystem
from launch.bench.with_llm import LLMSystem
from launch.bench.with_transformers import TransformersSystem
from launch.bench.workloads import Workload
from launch.cpus import available_cores

LLM_SHARE, CLUSTER_SHARE = 0.25, 0.4
"""Of a GPU's memory; the rest is transformers'."""


@contextmanager
def lineup(
    workload: Workload, dtype: str = "auto", device: Device = "auto", topology: str | None = None
) -> Iterator[tuple[System, System, ClusterSystem]]:
    """transformers' generate, `LLM` and a cluster for the length of a `with` block. `dtype` auto is what the engine
    would choose on this device, for transformers, too.

    Raises TriptychError("invalid_request") for a dtype that there is not.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise TriptychError("invalid_request", f"dtype {dtype!r} is not one of auto, {', '.join(DTYPES)}", "dtype")
    where, cores, info = choose_device(device), available_cores(), workload.info
    chosen = DTYPES[dtype] if dtype != "auto" else choose_dtype("auto", where, info)
    name = str(chosen).removeprefix("torch.")
    shares: list[dict[str, Any]] = [{"device": where.type}, {"device": where.type}]
    if where.type == "cuda":
        shares[0]["memory_fraction"], shares[1]["memory_fraction"] = LLM_SHARE, CLUSTER_SHARE
    with (
        closing(TransformersSystem(info, chosen, cores, where.type)) as theirs,
        closing(LLMSystem(info, name, cores, **shares[0])) as llm,
        closing(ClusterSystem(info, name, topology, **shares[1])) as cluster,
    ):
        yield theirs, llm, cluster
