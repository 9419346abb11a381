"""A whole cluster on one GPU: encoding apart (1e1pd) against one process for all (1epd), pictures and text together.

Clients send requests with pictures, so many at a time; beside them a probe of text alone is always under way: what
does somebody notice who has sent no picture?
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from common.config import EngineConfig, Settings
from launch.client import ApiClient, ClientOptions, Job, Outcome
from launch.cluster import LocalCluster
from launch.gpu.bench.pictures import noise_picture
from launch.gpu.bench.setup import Setup
from launch.gpu.figures import Figure, durations
from launch.gpu.shapes import qwen2_5_vl_3b
from launch.media import Media

TOPOLOGIES: Final = ("1epd", "1e1pd")
PICTURES: Final = (1, 4, 8)
IN_FLIGHT, REQUESTS, TOKENS, SIDE, TIMEOUT_S = 4, 24, 32, 448, 120.0
TOY_TOPOLOGIES: Final = ("1e1pd",)
TOY_PICTURES, TOY_REQUESTS, TOY_TOKENS, TOY_SIDE = (1,), 2, 4, 56
START_TIMEOUT_S: Final = 120.0
_WORDS: Final = ["tell", "me", "what", "is", "on", "the", "signs", "and", "how", "many", "of", "them", "there", "are"]


def measure(setup: Setup) -> list[Figure]:
    """TTFT and TPOT of requests with 1, 4 and 8 pictures, and of the probes beside them, for each topology."""
    folder, topologies = setup.model(qwen2_5_vl_3b), TOY_TOPOLOGIES if setup.toy else TOPOLOGIES
    return [figure for topology in topologies for figure in _measure_topology(setup, folder, topology)]


def _measure_topology(setup: Setup, folder: Path, topology: str) -> list[Figure]:
    engine = EngineConfig(device=setup.device.type, load_format="dummy", max_num_batched_tokens=2048)
    settings = Settings(model=str(folder), port=0, log_level="warning", engine=engine)
    with LocalCluster(settings, topology, start_timeout_s=START_TIMEOUT_S) as cluster:
        return asyncio.run(_ask(setup, cluster.base_url, topology))


async def _ask(setup: Setup, url: str, topology: str) -> list[Figure]:
    tokens = TOY_TOKENS if setup.toy else TOKENS
    figures = []
    async with ApiClient(ClientOptions(url, None, tokens, 0.0, TIMEOUT_S)) as client:
        await client.connect()
        await _load(client, setup, 1, 1)  # warms up
        for count in TOY_PICTURES if setup.toy else PICTURES:
            asked, probes = await _load(client, setup, count, TOY_REQUESTS if setup.toy else REQUESTS)
            figures += _figures(topology, f"{count} pictures", asked)
            figures += _figures(topology, f"text beside {count} pictures", probes)
    return figures


async def _load(client: ApiClient, setup: Setup, pictures: int, requests: int) -> tuple[list[Outcome], list[Outcome]]:
    """Outcomes of the requests with pictures, and of the probes. Raises RuntimeError where one failed."""
    side, places = TOY_SIDE if setup.toy else SIDE, asyncio.Semaphore(IN_FLIGHT)
    rng, done = random.Random(pictures), asyncio.Event()

    async def ask(number: int) -> Outcome:
        async with places:
            media = tuple(Media(f"{number}-{index}.png", "image/png", noise_picture(side)) for index in range(pictures))
            return await client.send(Job(f"pictures {number}", _question(rng), media))

    async def probe() -> list[Outcome]:
        outcomes = [await client.send(Job("probe", _question(rng)))]
        while not done.is_set():
            outcomes.append(await client.send(Job("probe", _question(rng))))
        return outcomes

    probing = asyncio.create_task(probe())
    asked = await asyncio.gather(*(ask(number) for number in range(requests)))
    done.set()
    outcomes, probes = list(asked), await probing
    failed = [one.error for one in (*outcomes, *probes) if one.error is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(outcomes) + len(probes)} requests failed: {failed[0]}")
    return outcomes, probes


def _figures(topology: str, case: str, outcomes: Sequence[Outcome]) -> list[Figure]:
    ttft_s = [one.ttft_s for one in outcomes if one.ttft_s is not None]
    tpot_s = [_tpot_s(one) for one in outcomes if one.ttft_s is not None and (one.completion_tokens or 0) > 1]
    return [
        durations("serving", f"{topology}, {case}: {name}", seconds)
        for name, seconds in (("TTFT", ttft_s), ("TPOT", tpot_s))
        if seconds
    ]


def _tpot_s(outcome: Outcome) -> float:
    """Seconds for each token after the first one."""
    return (outcome.latency_s - (outcome.ttft_s or 0.0)) / ((outcome.completion_tokens or 2) - 1)


def _question(rng: random.Random) -> str:
    return " ".join(rng.sample(_WORDS, 6)) + "?"
