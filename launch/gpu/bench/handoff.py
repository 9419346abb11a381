"""The way of an encoder output from one worker's GPU memory into another's cache, by transport.

Between real workers, one request after the other: from the end of the encoder's batch until the receiver has stored
the tensor. The model has the width of a Qwen2.5-VL-3B and two layers: what it computes does not matter here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from common.config import Transport
from common.model_info import ModelInfo, load_model_info
from common.text import TextProcessor
from launch.bench.with_cluster import ClusterSystem
from launch.bench.workloads import BenchRequest
from launch.gpu.bench.pictures import noise_picture
from launch.gpu.bench.setup import Setup
from launch.gpu.figures import Figure, duration, rate
from launch.gpu.shapes import qwen2_5_vl_shallow

TRANSPORTS: Final[tuple[Transport, ...]] = ("cuda", "shm", "zmq", "redis")
TOY_TRANSPORTS: Final[tuple[Transport, ...]] = ("auto",)
SIDES: Final = (448, 896)
TOY_SIDES: Final = (56,)
REQUESTS, TOY_REQUESTS, WARM_UP = 20, 3, 3
QUESTION: Final = "what is this?"
WAY: Final = "encode_done -> stored"


def measure(setup: Setup) -> list[Figure]:
    """Milliseconds and GB/s for each transport and size; the limit is one copy within the device."""
    info = load_model_info(str(setup.model(qwen2_5_vl_shallow)))
    transports = TOY_TRANSPORTS if setup.toy else TRANSPORTS
    return [figure for transport in transports for figure in _measure_transport(setup, info, transport)]


def _measure_transport(setup: Setup, info: ModelInfo, transport: Transport) -> list[Figure]:
    count = TOY_REQUESTS if setup.toy else REQUESTS
    options = {"device": setup.device.type, "load_format": "dummy", "max_model_len": 1024 if setup.toy else 4096}
    system = ClusterSystem(info, "auto", "1e1pd", transport=transport, **options)
    figures = []
    try:
        for side in TOY_SIDES if setup.toy else SIDES:
            requests = _requests(info, side)
            outcomes = [system.run([next(requests)])[0] for _ in range(WARM_UP + count)]
            seconds = system.hops(outcomes[WARM_UP:])[WAY]
            figures += _figures(setup, transport, _output_bytes(setup, info, side), seconds)
    finally:
        system.close()
    return figures


def _figures(setup: Setup, transport: str, size_bytes: int, seconds: list[float]) -> list[Figure]:
    least_s = setup.limits.least_s(2 * size_bytes)  # read and written
    case = f"{transport}, {size_bytes / 2**20:.3g} MiB"
    return [
        duration("handoff", case, seconds, least_s, "encoded until stored"),
        rate("handoff", case, "GB/s", seconds, size_bytes / 1e9, size_bytes / least_s / 1e9),
    ]


def _requests(info: ModelInfo, side: int) -> Iterator[BenchRequest]:
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    prompt = TextProcessor(info).render_chat([{"role": "user", "content": content}])
    while True:
        yield BenchRequest("image", prompt, max_tokens=1, question=QUESTION, pictures=(noise_picture(side),))


def _output_bytes(setup: Setup, info: ModelInfo, side: int) -> int:
    """One row for each square of 28 x 28 pixels; sides here are multiples of that."""
    item_bytes = 2 if setup.device.type == "cuda" else 4
    return (side // 28) ** 2 * int(info.text_config["hidden_size"]) * item_bytes
