"""A whole cluster on one GPU: encoding apart (1e1pd) against one process for all (1epd), pictures and text together.

Clients send requests with pictures, so many at a time; beside them probes of text alone are always under way: what
does somebody notice who has sent no picture?
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from common.config import EngineConfig, Settings
from launch.cluster.local_cluster import LocalCluster
from tools.bench.client import LoadClient, Outcome, payload_of
from tools.bench.gpu.attention import of_cluster
from tools.bench.gpu.figures import Figure, durations
from tools.bench.gpu.setup import Setup, attempted, noise_image
from tools.bench.gpu.steps import least_step_s
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
    share = share_of(setup.device, MEMORY_FRACTION)
    engine = EngineConfig(load_format="dummy", max_num_batched_tokens=2048, **share)
    settings = Settings(model=str(folder), port=0, log_level="warning", engine=engine)
    with LocalCluster(settings, topology, start_timeout_s=START_TIMEOUT_S) as cluster:
        attention = of_cluster(cluster, setup.device)
        for figure in _measure_loads(setup, folder, topology, cluster.base_url):
            yield attention.beside(figure)


def _measure_loads(setup: Setup, folder: Path, topology: str, url: str) -> Iterator[Figure]:
    tpot_s = least_step_s(setup.limits, folder, setup.dtype, IN_FLIGHT + PROBES)
    requests, counts = (TOY_REQUESTS, TOY_PICTURES) if setup.toy else (REQUESTS, PICTURES)
    asyncio.run(_load(setup, url, 1, 1))  # warms up
    alone = asyncio.run(_load(setup, url, 0, requests))
    yield from _figures(topology, "text alone", alone.probes, tpot_s)
    for count in counts:
        done = asyncio.run(_load(setup, url, count, requests))
        yield from _figures(topology, f"{count} pictures", done.asked, tpot_s)
        yield from _figures(topology, f"text beside {count} pictures", done.probes, tpot_s)


@dataclass
class Load:
    """Outcomes: of requests with pictures, and of probes of text."""

    asked: list[Outcome] = field(default_factory=list)
    probes: list[Outcome] = field(default_factory=list)


async def _load(setup: Setup, url: str, pictures: int, requests: int) -> Load:
    """Keep all load up until there are `requests` of each kind; without pictures, probes are alone.

    Raises RuntimeError where a request failed.
    """
    tokens, side = (TOY_TOKENS, TOY_SIDE) if setup.toy else (TOKENS, SIDE)
    client, load, rng = LoadClient(url), Load(), random.Random(pictures)

    async def ask(count: int, outcomes: list[Outcome]) -> None:
        while len(load.probes) < requests or (pictures and len(load.asked) < requests):
            images = tuple([await asyncio.to_thread(noise_image, side) for _ in range(count)])
            question = " ".join(rng.sample(_WORDS, 6)) + "?"
            request = BenchRequest("image", [], tokens, question=question, pictures=images)
            outcome = await client.ask(client.build(*payload_of(request)))
            if outcome.status != 200:
                raise RuntimeError(f"a request with {count} images was answered {outcome.status}: {outcome.error}")
            outcomes.append(outcome)

    async with asyncio.TaskGroup() as group:
        for _ in range(PROBES):
            group.create_task(ask(0, load.probes))
        for _ in range(IN_FLIGHT if pictures else 0):
            group.create_task(ask(pictures, load.asked))
    await client.close()
    return load


def _figures(topology: str, case: str, outcomes: Sequence[Outcome], least_tpot_s: float) -> Iterator[Figure]:
    """Yield TTFT, and TPOT beside a decode step's weights read once."""
    ttft_s = [one.ttft_s for one in outcomes if one.ttft_s is not None]
    tpot_s = [one.tpot_s for one in outcomes if one.ttft_s is not None and one.num_tokens > 1]
    yield durations("serving", f"{topology}, {case}: TTFT", ttft_s)
    if tpot_s:
        yield durations("serving", f"{topology}, {case}: TPOT", tpot_s, least_tpot_s)
