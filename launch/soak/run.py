"""One soak from the start of its cluster to the last look at what it left."""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from common.config import EngineConfig, Settings
from launch.cluster import LocalCluster
from launch.held import held
from launch.soak.asks import draw_asks
from launch.soak.faults import Faults
from launch.soak.load import Tally, run_load
from launch.soak.memory import MemoryLog, processes, resident_bytes
from launch.soak.report import MIB, Findings

SAMPLE_S: Final = 60.0
RETURN_S: Final = 60.0
"""How long workers that were killed last may take to come back before the last look."""
SETTLE_S: Final = 2.0
"""How soon after the last request nothing may be held."""
TORCH_CACHE: Final = "torchinductor_"
"""What torch keeps for its next start, on purpose."""
_POLL_S: Final = 0.1
_KV_BYTES: Final = 24 * MIB
_ENCODER_CACHE_BYTES: Final = 2 * MIB
"""Small ones: they fill and evict within minutes."""


@dataclass(frozen=True)
class Plan:
    """What is going to be done."""

    minutes: float
    model: str
    topology: str
    in_flight: int
    fault_every_s: float
    seed: int

    @property
    def seconds(self) -> float:
        return 60 * self.minutes


def run_soak(plan: Plan, tell: Callable[[str], None]) -> Findings:
    """Run it; progress goes to `tell`. Raises TriptychError where the cluster does not start."""
    engine = EngineConfig(num_threads=1, kv_cache_bytes=_KV_BYTES, encoder_cache_bytes=_ENCODER_CACHE_BYTES)
    settings = Settings(
        model=plan.model, port=0, cluster="soak", topology=plan.topology, log_level="error", engine=engine
    )
    tally, memory = Tally(), MemoryLog()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder  # so that a file that is left shows
        tell(f"starting {plan.model} as {plan.topology}, seed {plan.seed}")
        with LocalCluster(settings) as cluster:
            faults = Faults(cluster, random.Random(f"faults {plan.seed}"), plan.fault_every_s, tell)
            asyncio.run(_load(plan, cluster, tally, memory, faults, tell))
            left = _wait_until_nothing_is_held(cluster, tell)
            lives, restarts = memory.survivors(), {i.id: i.restarts for i in cluster.instances.values()}
            pids = [pid for name, pid in processes(cluster) if pid != os.getpid()]
        remains = [f"process {pid}" for pid in pids if resident_bytes(pid)]
        remains += [str(path) for path in sorted(memory.shared) if path.exists()]
        remains += [str(path) for path in Path(folder).iterdir() if not path.name.startswith(TORCH_CACHE)]
    name = settings.model
    return Findings(
        plan.minutes,
        name,
        plan.topology,
        plan.in_flight,
        plan.seed,
        tally,
        faults.counts,
        restarts,
        lives,
        left,
        remains,
    )


async def _load(
    plan: Plan, cluster: LocalCluster, tally: Tally, memory: MemoryLog, faults: Faults, tell: Callable[[str], None]
) -> None:
    asks = draw_asks(cluster.supervisor.plan.info.name, random.Random(f"asks {plan.seed}"))
    watching = asyncio.create_task(_watch(plan, cluster, tally, memory, tell))
    breaking = [asyncio.create_task(faults.run())] if plan.fault_every_s else []
    try:
        await run_load(cluster.base_url, asks, tally, in_flight=plan.in_flight, seconds=plan.seconds)
    finally:
        for task in (watching, *breaking):
            task.cancel()
        await asyncio.gather(watching, *breaking, return_exceptions=True)


async def _watch(
    plan: Plan, cluster: LocalCluster, tally: Tally, memory: MemoryLog, tell: Callable[[str], None]
) -> None:
    """Sample and tell, once a minute; more often where the run is short."""
    began_s = time.monotonic()
    while True:
        at_s = time.monotonic() - began_s
        sizes = await asyncio.to_thread(memory.sample, cluster, at_s)
        shown = "  ".join(f"{name} {size / MIB:.1f}" for name, size in sizes.items())
        endings = " ".join(f"{ending}={count}" for ending, count in sorted(tally.endings.items()))
        tell(f"{at_s / 60:6.1f} min  {endings} wrong={tally.wrong}  MiB: {shown}")
        await asyncio.sleep(min(SAMPLE_S, plan.seconds / 30))


def _wait_until_nothing_is_held(cluster: LocalCluster, tell: Callable[[str], None]) -> dict[str, float]:
    """What is still held two seconds after the last request ended and all workers are back."""
    deadline_s = time.monotonic() + RETURN_S
    while any(i.state != "ready" for i in cluster.instances.values()) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    deadline_s = time.monotonic() + SETTLE_S
    while (left := held(cluster)) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    tell(f"held at the end: {left or 'nothing'}")
    return left
