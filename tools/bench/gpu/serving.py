"""A whole cluster on one GPU: encoding apart (1e1pd, with and without MPS) against one process for all (1epd).

Clients send requests with pictures, so many at a time; beside them probes of text alone are always under way: what
does somebody notice who has sent no picture?
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
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

SYSTEMS: Final = ("1e1pd", "1epd", "1e1pd with MPS")
"""A topology each. A single process has nobody to share the GPU with by MPS."""
PICTURES: Final = (1, 4, 8)
IN_FLIGHT, PROBES, REQUESTS, TOKENS, SIDE = 4, 4, 100, 16, 448
"""At least so many requests, and as many probes beside them: fewer have no 99th percentile. So many of each are under
way: a single probe at a time would take five times as long to have as many answers."""
MEMORY_FRACTION: Final = 0.85
TOY_SYSTEMS: Final = SYSTEMS[:2]
TOY_PICTURES, TOY_REQUESTS, TOY_TOKENS, TOY_SIDE = PICTURES[:2], 2, 4, 56
START_TIMEOUT_S: Final = 120.0
MODEL: Final = "model"
"""The name of it in the API."""
Measure = Callable[[Setup, Path, str], Iterator[Figure]]
"""Yields the figures of a cluster, given the folder of the model and the address."""
_WORDS: Final = ["tell", "me", "what", "is", "on", "the", "signs", "and", "how", "many", "of", "them", "there", "are"]


def on_systems(setup: Setup, loads: Mapping[str, Measure]) -> Iterator[Figure]:
    """Yield the figures of all loads, by benchmark, on one cluster of each system in turn; the case begins with the
    system's name."""
    folder = setup.model(qwen2_5_vl_3b)
    for system in TOY_SYSTEMS if setup.toy else setup.systems or SYSTEMS:
        yield from attempted("serving", f"{system}, all of it", _on_system, setup, folder, system, loads)


def _on_system(setup: Setup, folder: Path, system: str, loads: Mapping[str, Measure]) -> Iterator[Figure]:
    topology, _, mps = system.partition(" with ")
    share = share_of(setup.device, MEMORY_FRACTION)
    engine = EngineConfig(load_format="dummy", max_num_batched_tokens=2048, **share)
    settings = Settings(model=str(folder), served_model_name=(MODEL,), port=0, log_level="warning", engine=engine)
    with (
        mps_daemon(setup.folder) if mps else nullcontext(),
        LocalCluster(settings, topology, start_timeout_s=START_TIMEOUT_S) as cluster,
    ):
        attention = of_cluster(cluster, setup.device)
        asyncio.run(_load(setup, cluster.base_url, 1, 1))  # warms up
        for name, measure in loads.items():
            for figure in attempted(name, "all of it", measure, setup, folder, cluster.base_url):
                yield attention.beside(replace(figure, benchmark=name, case=f"{system}, {figure.case}"))


@contextmanager
def mps_daemon(folder: Path) -> Iterator[None]:
    """Run NVIDIA's daemon for the processes that start meanwhile. Raises FileNotFoundError where there is none."""
    names = {"CUDA_MPS_PIPE_DIRECTORY": folder / "mps", "CUDA_MPS_LOG_DIRECTORY": folder / "mps-log"}
    for name, directory in names.items():
        directory.mkdir(exist_ok=True)
        os.environ[name] = str(directory)
    try:
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
        try:
            yield
        finally:
            subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, check=True)
    finally:
        for name in names:
            del os.environ[name]


def measure(setup: Setup, folder: Path, url: str) -> Iterator[Figure]:
    """Yield TTFT and TPOT of probes alone, of requests with 1, 4 and 8 pictures, and of probes beside them."""
    tpot_s = least_step_s(setup.limits, folder, setup.dtype, IN_FLIGHT + PROBES)
    requests, counts = (TOY_REQUESTS, TOY_PICTURES) if setup.toy else (REQUESTS, PICTURES)
    alone = asyncio.run(_load(setup, url, 0, requests))
    yield from times("text alone", alone.probes, tpot_s)
    for count in counts:
        done = asyncio.run(_load(setup, url, count, requests))
        yield from times(f"{count} pictures", done.asked, tpot_s)
        yield from times(f"text beside {count} pictures", done.probes, tpot_s)


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
            images = [await asyncio.to_thread(noise_image, side) for _ in range(count)]
            outcomes.append(await ask_about(client, images, tokens, rng))

    async with asyncio.TaskGroup() as group:
        for _ in range(PROBES):
            group.create_task(ask(0, load.probes))
        for _ in range(IN_FLIGHT if pictures else 0):
            group.create_task(ask(pictures, load.asked))
    await client.close()
    return load


async def ask_about(client: LoadClient, images: Sequence[bytes], tokens: int, rng: random.Random) -> Outcome:
    """Return the answer to a question about images, or about none. Raises RuntimeError where it failed."""
    question = " ".join(rng.sample(_WORDS, 6)) + "?"
    request = BenchRequest("image", [], tokens, question=question, pictures=tuple(images))
    outcome = await client.ask(client.build(*payload_of(request)))
    if outcome.status != 200:
        raise RuntimeError(f"a request with {len(images)} images was answered {outcome.status}: {outcome.error}")
    return outcome


def times(case: str, outcomes: Sequence[Outcome], least_tpot_s: float) -> Iterator[Figure]:
    """Yield TTFT, and TPOT beside a decode step's weights read once."""
    ttft_s = [one.ttft_s for one in outcomes if one.ttft_s is not None]
    tpot_s = [one.tpot_s for one in outcomes if one.ttft_s is not None and one.num_tokens > 1]
    yield durations("serving", f"{case}: TTFT", ttft_s)
    if tpot_s:
        yield durations("serving", f"{case}: TPOT", tpot_s, least_tpot_s)
