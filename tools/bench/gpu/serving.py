"""A whole cluster on one GPU: encoding apart (1e1pd) against one process for all (1epd), pictures and text together.

Clients send requests with pictures, so many at a time; beside them probes of text alone are always under way: what
does somebody notice who has sent no picture?
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from common.config import EngineConfig, Settings
from common.model_info import ModelInfo, load_model_info
from engine import processors
from engine.models.registry import make_decoder as make_decoder_of
from engine.models.registry import make_encoder
from launch.cluster.local_cluster import LocalCluster
from tools.bench.client import LoadClient, Outcome, payload_of
from tools.bench.gpu.attention import of_cluster
from tools.bench.gpu.decode import least_step_s
from tools.bench.gpu.encoder import encoder_flops
from tools.bench.gpu.figures import Figure, durations
from tools.bench.gpu.prefill import prefill_flops
from tools.bench.gpu.setup import Setup, attempted, noise_image
from tools.bench.systems import share_of
from tools.bench.workloads import BenchRequest
from tools.gpu_check.shapes import qwen2_5_vl_3b

TOPOLOGIES: Final = ("1e1pd", "1epd")
PICTURES: Final = (1, 4, 8)
IN_FLIGHT, PROBES, REQUESTS, TOKENS, SIDE = 4, 4, 100, 16, 448
"""At least so many requests, and as many probes beside them: fewer have no 99th percentile. So many of each are under
way: a single probe at a time would take five times as long to have as many answers."""
MEMORY_FRACTION: Final = 0.85
TOY_TOPOLOGIES: Final = ("1e1pd",)
TOY_PICTURES, TOY_REQUESTS, TOY_TOKENS, TOY_SIDE = (1,), 2, 4, 56
START_TIMEOUT_S: Final = 120.0
_WORDS: Final = ["tell", "me", "what", "is", "on", "the", "signs", "and", "how", "many", "of", "them", "there", "are"]


def measure(setup: Setup) -> Iterator[Figure]:
    """Yield for each topology TTFT and TPOT of probes alone, of requests with 1, 4 and 8 pictures, and of probes beside
    them."""
    folder = setup.model(qwen2_5_vl_3b)
    for topology in TOY_TOPOLOGIES if setup.toy else TOPOLOGIES:
        yield from attempted("serving", topology, _measure_topology, setup, folder, topology)


def _measure_topology(setup: Setup, folder: Path, topology: str) -> Iterator[Figure]:
    info, share = load_model_info(str(folder)), share_of(setup.device, MEMORY_FRACTION)
    engine = EngineConfig(load_format="dummy", max_num_batched_tokens=2048, **share)
    settings = Settings(model=str(folder), port=0, log_level="warning", engine=engine)
    with LocalCluster(settings, topology, start_timeout_s=START_TIMEOUT_S) as cluster:
        attention = of_cluster(cluster, setup.device)
        for figure in _measure_loads(setup, info, topology, cluster.base_url):
            yield attention.of(figure)


def _measure_loads(setup: Setup, info: ModelInfo, topology: str, url: str) -> Iterator[Figure]:
    tpot_s = least_step_s(setup.limits, info.folder, setup.dtype, IN_FLIGHT + PROBES)
    text_s = least_ttft_s(setup, info, 0)
    requests, counts = (TOY_REQUESTS, TOY_PICTURES) if setup.toy else (REQUESTS, PICTURES)
    asyncio.run(_load(setup, url, 1, 1))  # warms up
    alone = asyncio.run(_load(setup, url, 0, requests))
    yield from _figures(topology, "text alone", alone.probes, text_s, tpot_s)
    for count in counts:
        done = asyncio.run(_load(setup, url, count, requests))
        yield from _figures(topology, f"{count} pictures", done.asked, least_ttft_s(setup, info, count), tpot_s)
        yield from _figures(topology, f"text beside {count} pictures", done.probes, text_s, tpot_s)


def least_ttft_s(setup: Setup, info: ModelInfo, pictures: int) -> float:
    """The least that a first token can take behind so many pictures, with the device for itself: the products of
    matrices of their encoder, and then those of their tokens' prefill, or its weights read once.

    Text, preprocessing and every way between processes are left out, and who is served at the same time.
    """
    side = TOY_SIDE if setup.toy else SIDE
    encode_s, tokens = 0.0, 0
    if pictures:
        processors.init_worker(str(info.folder), str(setup.dtype).removeprefix("torch."))
        item = processors.process(info.media_kind or "", noise_image(side))
        tokens = pictures * item.shape[0]
        encode_s = setup.limits.least_s(0.0, pictures * encoder_flops(make_encoder(info).module, item))
    prefill_s = setup.limits.least_s(0.0, prefill_flops(make_decoder_of(info), tokens)) if tokens else 0.0
    return encode_s + max(prefill_s, least_step_s(setup.limits, info.folder, setup.dtype, 1))


@dataclass
class Load:
    """What has been answered: requests with pictures, and probes of text."""

    client: LoadClient
    rng: random.Random
    side: int
    max_tokens: int
    asked: list[Outcome] = field(default_factory=list)
    probes: list[Outcome] = field(default_factory=list)

    async def ask(self, pictures: int, done: Callable[[], bool]) -> None:
        while not done():
            images = await asyncio.gather(*(asyncio.to_thread(noise_image, self.side) for _ in range(pictures)))
            self.asked.append(await self._send(tuple(images)))

    async def probe(self, done: Callable[[], bool]) -> None:
        while not done():
            self.probes.append(await self._send(()))

    async def _send(self, images: tuple[bytes, ...]) -> Outcome:
        """Raise RuntimeError where the request failed."""
        question = " ".join(self.rng.sample(_WORDS, 6)) + "?"
        request = BenchRequest("image", [], self.max_tokens, question=question, pictures=images)
        outcome = await self.client.ask(self.client.build(*payload_of(request)))
        if outcome.status != 200:
            raise RuntimeError(f"a request with {len(images)} images was answered {outcome.status}: {outcome.error}")
        return outcome


async def _load(setup: Setup, url: str, pictures: int, requests: int) -> Load:
    """All load lasts until there are `requests` of each kind; without pictures, probes are alone."""
    tokens, side = (TOY_TOKENS, TOY_SIDE) if setup.toy else (TOKENS, SIDE)
    load = Load(LoadClient(url), random.Random(pictures), side, tokens)

    def done() -> bool:
        return len(load.probes) >= requests and (not pictures or len(load.asked) >= requests)

    async with asyncio.TaskGroup() as group:
        for _ in range(PROBES):
            group.create_task(load.probe(done))
        for _ in range(IN_FLIGHT if pictures else 0):
            group.create_task(load.ask(pictures, done))
    await load.client.close()
    return load


def _figures(
    topology: str, case: str, outcomes: Sequence[Outcome], least_ttft_s: float, least_tpot_s: float
) -> list[Figure]:
    """TPOT stands beside a decode step's weights read once."""
    ttft_s = [one.ttft_s for one in outcomes if one.ttft_s is not None]
    tpot_s = [one.tpot_s for one in outcomes if one.ttft_s is not None and one.num_tokens > 1]
    return [
        durations("serving", f"{topology}, {case}: {name}", seconds, limit_s)
        for name, seconds, limit_s in (("TTFT", ttft_s, least_ttft_s), ("TPOT", tpot_s, least_tpot_s))
        if seconds
    ]
