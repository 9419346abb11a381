"""One soak from the start of its clusters to the last look at what they left."""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from common.config import EngineConfig, Settings
from common.process import memory_upkeep
from launch.cluster.instance import Reporter
from launch.cluster.local_cluster import LocalCluster
from tools.bench.measure import emit
from tools.soak.faults import Faults, is_spared
from tools.soak.leak_check import held
from tools.soak.load import Job, LoadProcess
from tools.soak.memory import MemoryLog, processes, resident_bytes
from tools.soak.report import LOAD, MIB, Findings, Part, Plan

SUPERVISORS: Final = "supervisors"
"""This process: it looks after all the clusters, breaks them and takes the samples, but asks nothing."""
SAMPLE_S: Final = 5.0
"""Often enough to see what comes and goes between two times that a process gives free memory back."""
EMIT_S: Final = 60.0
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


class KeptLogs(Reporter):
    """Notes which folder of logs a supervisor keeps at its end, on purpose, and why."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.why = ""

    def stopped(self, killed: Sequence[str], kept_logs: str | None) -> None:
        self.folder = kept_logs
        self.why = f"{', '.join(killed)} had to be killed" if killed else "a process was being started again"


class Side:
    """One part of a soak while it runs."""

    def __init__(self, part: Part, plan: Plan) -> None:
        """Settle what will run. Raises TriptychError where the model or the topology is none."""
        engine = EngineConfig(
            num_threads=1,
            kv_cache_bytes=_KV_BYTES,
            encoder_cache_bytes=_ENCODER_CACHE_BYTES,
            encoder_output_cache_bytes=_ENCODER_CACHE_BYTES,
        )
        self.part, self._plan = part, plan
        self.load, self.logs, self.num_shown = LoadProcess(), KeptLogs(), 0
        cluster, topology = f"soak-{part.name}", part.topology
        settings = Settings(
            model=part.model, port=0, cluster=cluster, topology=topology, log_level="error", engine=engine
        )
        self.cluster = LocalCluster(settings, reporter=self.logs)
        self.faults = Faults(self.cluster, random.Random(f"{part.name} faults {plan.seed}"), plan.fault_every_s)

    async def run(self) -> None:
        """Load it, and break it, until the time is over and the last request has ended."""
        model, seed = self.cluster.supervisor.plan.info.name, f"{self.part.name} asks {self._plan.seed}"
        job = Job(self.part.name, model, seed, self.cluster.base_url, self.part.in_flight, self._plan.seconds)
        breaking = asyncio.create_task(self.faults.run())
        try:
            await self.load.run(job)
        finally:
            breaking.cancel()
            await asyncio.gather(breaking, return_exceptions=True)

    def processes(self) -> list[tuple[str, int]]:
        """Return names and ids of the cluster's processes."""
        return [(f"{self.part.name} {name}", pid) for name, pid in processes(self.cluster)]

    @property
    def spared(self) -> list[str]:
        """The names of the processes that no fault hits."""
        names = ["broker", *(instance.id for instance in self.cluster.instances.values() if is_spared(instance))]
        return [f"{self.part.name} {name}" for name in names]

    def wait_until_nothing_is_held(self) -> dict[str, float]:
        """Return what is still held two seconds after the last request ended and all workers are back."""
        deadline_s = time.monotonic() + RETURN_S
        while any(i.state != "ready" for i in self.cluster.instances.values()) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        deadline_s = time.monotonic() + SETTLE_S
        while (left := held(self.cluster)) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        return {f"{self.part.name} {what}": count for what, count in left.items()}

    def restarts(self) -> dict[str, int]:
        """Return how often each of its processes was started again."""
        return {f"{self.part.name} {i.id}": i.restarts for i in self.cluster.instances.values()}

    def show(self, at_s: float) -> None:
        """Emit the counts, and the failures since the last time."""
        tally, name = self.load.tally, self.part.name
        endings = " ".join(f"{ending}={count}" for ending, count in sorted(tally.endings.items()))
        emit(f"{at_s / 60:6.1f} min  {name}: {endings} wrong={tally.wrong}")
        for what in tally.told[self.num_shown :]:
            emit(f"{'':12}{what}")
        self.num_shown = len(tally.told)


def run_soak(plan: Plan) -> Findings:
    """Run it; progress goes to standard error. Raises TriptychError where a cluster does not start."""
    memory, sides = MemoryLog(), [Side(part, plan) for part in plan.parts]
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder  # so that a file that is left shows
        with ExitStack() as clusters:
            for side in sides:
                emit(f"starting {side.part}, seed {plan.seed}")
                clusters.enter_context(side.cluster)
            asyncio.run(_load(plan, sides, memory))
            left = {what: count for side in sides for what, count in side.wait_until_nothing_is_held().items()}
            pids = [pid for side in sides for _, pid in side.processes()]
        remains = [f"process {pid}" for pid in pids if resident_bytes(pid)]
        remains += [str(path) for path in sorted(memory.shared) if path.exists()]
        kept = {side.logs.folder for side in sides}
        files = (path for path in Path(folder).iterdir() if not path.name.startswith(TORCH_CACHE))
        remains += [str(path) for path in files if str(path) not in kept]
    return Findings(
        plan,
        [side.load.tally for side in sides],
        [side.faults.counts for side in sides],
        {name: count for side in sides for name, count in side.restarts().items()},
        [SUPERVISORS, *(name for side in sides for name in side.spared)],
        memory.survivors(),
        left,
        remains,
        [f"of {side.part.name}, because {side.logs.why}" for side in sides if side.logs.folder],
    )


async def _load(plan: Plan, sides: list[Side], memory: MemoryLog) -> None:
    memory_upkeep.begin()  # as `serve` does
    watching = asyncio.create_task(_watch(plan, sides, memory))
    try:
        await asyncio.gather(*(side.run() for side in sides))
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _watch(plan: Plan, sides: list[Side], memory: MemoryLog) -> None:
    """Sample all the time, and show figures once a minute; more often where the run is short."""
    began_s = time.monotonic()
    next_shown_s = 0.0
    while True:
        at_s = time.monotonic() - began_s
        running = [(SUPERVISORS, os.getpid()), *(found for side in sides for found in side.processes())]
        running += [(f"{side.part.name} {LOAD}", side.load.pid) for side in sides if side.load.pid is not None]
        sizes = await asyncio.to_thread(memory.sample, running, at_s)
        if at_s >= next_shown_s:
            next_shown_s += min(EMIT_S, plan.seconds / 30)
            for side in sides:
                side.show(at_s)
            emit("            MiB: " + "  ".join(f"{name} {size / MIB:.1f}" for name, size in sizes.items()))
        await asyncio.sleep(min(SAMPLE_S, plan.seconds / 30))
