"""The way of an encoder output from one process's GPU memory into another's, by transport, and through a whole cluster.

By transport: between two processes of nothing but their ends, from `send` until the tensor lies checked in the other's
GPU memory: one alone (latency), and several under way (GB/s). Through a cluster: between real workers, one request
after the other, from the end of the encoder's batch until the receiver has stored the tensor; the model has the width
of a Qwen2.5-VL-3B and two layers: what it computes does not matter here.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final, cast

import torch

from broker.embedded import EmbeddedBroker
from broker.transports.nixl_agent import module_name
from common.config import Device, Transport
from common.model_info import ModelInfo, load_model_info
from common.text import TextProcessor
from launch.bench.with_cluster import ClusterSystem
from launch.bench.workloads import BenchRequest
from launch.gpu.bench.attempts import attempted
from launch.gpu.bench.device_ends import Way, ends
from launch.gpu.bench.pictures import noise_picture
from launch.gpu.bench.setup import Setup
from launch.gpu.figures import Figure, duration, rate
from launch.gpu.shapes import qwen2_5_vl_shallow

KIB, MIB = 2**10, 2**20
TRANSPORTS: Final[tuple[Transport, ...]] = ("cuda", "shm", "zmq", "nixl", "redis")
TOY_TRANSPORTS: Final[tuple[Transport, ...]] = ("shm",)
SIZES: Final = (64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
TOY_SIZES: Final = (64 * KIB,)
REDIS_BYTES: Final = 4 * MIB
"""Larger ones would take seconds by it."""
SINGLE, TOY_SINGLE, WARM_UP = 20, 3, 3
TURN_BYTES, MOST, LEAST = 512 * MIB, 128, 8
"""Of tensors that several are under way of: so many bytes, but no more and no fewer tensors."""
UNDER_WAY: Final = 4
TURNS: Final = 3
SIDES: Final = (448, 896)
TOY_SIDES: Final = (56,)
REQUESTS, TOY_REQUESTS = 20, 3
QUESTION: Final = "what is this?"
WAY: Final = "encode_done -> stored"


def measure(setup: Setup) -> Iterator[Figure]:
    """Two figures for each transport and size, one for each picture; the limit is one copy within the device."""
    with EmbeddedBroker() as broker:
        for transport in TOY_TRANSPORTS if setup.toy else TRANSPORTS:
            if transport != "nixl" or module_name() is not None:
                way = Way(transport, cast(Device, setup.device.type), broker)
                yield from attempted("handoff", transport, partial(_measure_transport, setup, way))
    yield from attempted("handoff", "through a cluster", partial(_measure_cluster, setup))


def _measure_transport(setup: Setup, way: Way) -> Iterator[Figure]:
    sizes = TOY_SIZES if setup.toy else SIZES
    with ends(way) as both:
        for size in sizes:
            if way.transport == "redis" and size > REDIS_BYTES:
                return
            tensor = torch.randn(size // 2, dtype=torch.bfloat16, device=setup.device)
            least_s, case = setup.limits.least_s(2 * size), f"{way.transport}, {_in_words(size)}"
            singles = TOY_SINGLE if setup.toy else SINGLE
            both.send_all([tensor] * WARM_UP, under_way=1)
            latencies_s, _ = both.send_all([tensor] * singles, under_way=1)
            yield duration("handoff", f"{case}, one alone", latencies_s, least_s)
            count = max(LEAST, min(MOST, TURN_BYTES // size))
            turns_s = [both.send_all([tensor] * count, UNDER_WAY)[1] for _ in range(TURNS)]
            gigabytes = count * size / 1e9
            yield rate("handoff", f"{case}, {UNDER_WAY} under way", "GB/s", turns_s, gigabytes, size / least_s / 1e9)


def _measure_cluster(setup: Setup) -> Iterator[Figure]:
    info = load_model_info(str(setup.model(qwen2_5_vl_shallow)))
    count = TOY_REQUESTS if setup.toy else REQUESTS
    max_model_len = 1024 if setup.toy else 4096
    options: dict[str, Any] = {"device": setup.device.type, "load_format": "dummy", "max_model_len": max_model_len}
    system = ClusterSystem(info, "auto", "1e1pd", **options)
    try:
        for side in TOY_SIDES if setup.toy else SIDES:
            requests = _requests(info, side)
            outcomes = [system.run([next(requests)])[0] for _ in range(WARM_UP + count)]
            seconds = system.hops(outcomes[WARM_UP:])[WAY]
            size = _output_bytes(setup, info, side)
            case = f"through a cluster, {_in_words(size)}"
            yield duration("handoff", case, seconds, setup.limits.least_s(2 * size), "encoded until stored")
    finally:
        system.close()


def _in_words(size: int) -> str:
    return f"{size / MIB:.3g} MiB" if size >= MIB else f"{size / KIB:.3g} KiB"


def _requests(info: ModelInfo, side: int) -> Iterator[BenchRequest]:
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    prompt = TextProcessor(info).render_chat([{"role": "user", "content": content}])
    while True:
        yield BenchRequest("image", prompt, max_tokens=1, question=QUESTION, pictures=(noise_picture(side),))


def _output_bytes(setup: Setup, info: ModelInfo, side: int) -> int:
    """One row for each square of 28 x 28 pixels; sides here are multiples of that."""
    item_bytes = 2 if setup.device.type == "cuda" else 4
    return (side // 28) ** 2 * int(info.text_config["hidden_size"]) * item_bytes
