"""One soak from the start of its clusters to the last look at what they left."""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from common.config import EngineConfig, Settings
from common.process import memory_upkeep
from launch.cluster.instance import Reporter
from launch.cluster.local_cluster import LocalCluster
from tools.soak.faults import Faults, is_spared
from tools.soak.leak_check import held
from tools.soak.load import Job, LoadProcess
from tools.soak.memory import MemoryLog, processes, resident_bytes
from tools.soak.report import MIB, Findings, Part, Plan

SUPERVISORS: Final = "supervisors"
"""This process: it looks after all the clusters, breaks them and takes the samples, but asks nothing."""
SAMPLE_S: Final = 5.0
"""Often enough to see what comes and goes between two times that a process gives free memory back."""
TELL_S: Final = 60.0
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

    def __init__(self, part: Part, seed: int, fault_every_s: float, tell: Callable[[str], None]) -> None:
        """Settle what will run. Raises TriptychError where the model or the topology is none."""
        engine = EngineConfig(
            num_threads=1,
            kv_cache_bytes=_KV_BYTES,
            encoder_cache_bytes=_ENCODER_CACHE_BYTES,
            encoder_output_cache_bytes=_ENCODER_CACHE_BYTES,
        )
        self.part, self.seed = part, seed
        self.load, self.logs = LoadProcess(), KeptLogs()
        self.cluster = LocalCluster(
            Settings(
                model=part.model,
                port=0,
                cluster=f"soak-{part.name}",
                topology=part.topology,
                log_level="error",
                engine=engine,
            ),
            reporter=self.logs,
        )
        self.faults = Faults(
            self.cluster, random.Random(f"{part.name} faults {seed}"), fault_every_s, lambda line: self._tell(line)
        )
        self._fault_every_s = fault_every_s
        self._told_to = tell

    async def run(self, seconds: float) -> None:
        """Load it, and break it, until the time is over and the last request has ended."""
        model, seed = self.cluster.supervisor.plan.info.name, f"{self.part.name} asks {self.seed}"
        job = Job(self.part.name, model, seed, self.cluster.base_url, self.part.in_flight, seconds)
        breaking = asyncio.create_task(self.faults.run()) if self._fault_every_s else None
        try:
            await self.load.run(job)
        finally:
            if breaking is not None:
                breaking.cancel()
                await asyncio.gather(breaking, return_exceptions=True)

    def processes(self) -> list[tuple[str, int]]:
        """Names and ids of the cluster's processes."""
        return [(f"{self.part.name} {name}", pid) for name, pid in processes(self.cluster)]

    @property
    def spared(self) -> list[str]:
        """The names of the processes that no fault hits."""
        names = ["broker", *(instance.id for instance in self.cluster.instances.values() if is_spared(instance))]
        return [f"{self.part.name} {name}" for name in names]

    def wait_until_nothing_is_held(self) -> dict[str, float]:
        """What is still held two seconds after the last request ended and all workers are back."""
        deadline_s = time.monotonic() + RETURN_S
        while any(i.state != "ready" for i in self.cluster.instances.values()) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        deadline_s = time.monotonic() + SETTLE_S
        while (left := held(self.cluster)) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        self._tell(f"held at the end: {left or 'nothing'}")
        return {f"{self.part.name} {what}": count for what, count in left.items()}

    def restarts(self) -> dict[str, int]:
        """How often each of its processes was started again."""
        return {f"{self.part.name} {i.id}": i.restarts for i in self.cluster.instances.values()}

    def _tell(self, line: str) -> None:
        self._told_to(f"{self.part.name}: {line}")


def run_soak(plan: Plan, tell: Callable[[str], None]) -> Findings:
    """Run it; progress goes to `tell`. Raises TriptychError where a cluster does not start."""
    memory, loads = MemoryLog(), MemoryLog()
    sides = [Side(part, plan.seed, plan.fault_every_s, tell) for part in plan.parts]
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder  # so that a file that is left shows
        with ExitStack() as clusters:
            for side in sides:
                tell(f"starting {side.part}, seed {plan.seed}")
                clusters.enter_context(side.cluster)
            asyncio.run(_load(plan, sides, memory, loads, tell))
            left = {what: count for side in sides for what, count in side.wait_until_nothing_is_held().items()}
            pids = [pid for side in sides for _, pid in side.processes()]
        remains = [f"process {pid}" for pid in pids if resident_bytes(pid)]
        remains += [str(path) for path in sorted(memory.shared) if path.exists()]
        remains += _left_files(Path(folder), kept=[side.logs.folder for side in sides])
    return Findings(
        plan,
        [side.load.tally for side in sides],
        [side.faults.counts for side in sides],
        {name: count for side in sides for name, count in side.restarts().items()},
        [SUPERVISORS, *(name for side in sides for name in side.spared)],
        memory.survivors(),
        loads.survivors(),
        left,
        remains,
        [f"of {side.part.name}, because {side.logs.why}" for side in sides if side.logs.folder],
    )


def _left_files(folder: Path, kept: Iterable[str | None]) -> list[str]:
    """What is in the folder for temporary files and should not be."""
    ours = set(kept)
    found = (path for path in folder.iterdir() if not path.name.startswith(TORCH_CACHE))
    return [str(path) for path in found if str(path) not in ours]


async def _load(
    plan: Plan, sides: list[Side], memory: MemoryLog, loads: MemoryLog, tell: Callable[[str], None]
) -> None:
    memory_upkeep.begin()  # as `serve` does
    watching = asyncio.create_task(_watch(plan, sides, memory, loads, tell))
    try:
        await asyncio.gather(*(side.run(plan.seconds) for side in sides))
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _watch(
    plan: Plan, sides: list[Side], memory: MemoryLog, loads: MemoryLog, tell: Callable[[str], None]
) -> None:
    """Sample all the time, and tell once a minute; more often where the run is short."""
    began_s = time.monotonic()
    next_told_s = 0.0
    num_told = dict.fromkeys((side.part.name for side in sides), 0)
    while True:
        at_s = time.monotonic() - began_s
        running = [(SUPERVISORS, os.getpid()), *(found for side in sides for found in side.processes())]
        asking = [(f"{side.part.name} load", side.load.pid) for side in sides]
        sizes = await asyncio.to_thread(memory.sample, running, at_s)
        sizes |= loads.sample([(name, pid) for name, pid in asking if pid is not None], at_s)
        if at_s >= next_told_s:
            next_told_s += min(TELL_S, plan.seconds / 30)
            _tell_all(at_s, sides, num_told, sizes, tell)
        await asyncio.sleep(min(SAMPLE_S, plan.seconds / 30))


def _tell_all(
    at_s: float, sides: list[Side], num_told: dict[str, int], sizes: dict[str, int], tell: Callable[[str], None]
) -> None:
    for side in sides:
        tally = side.load.tally
        endings = " ".join(f"{ending}={count}" for ending, count in sorted(tally.endings.items()))
        tell(f"{at_s / 60:6.1f} min  {side.part.name}: {endings} wrong={tally.wrong}")
        for what in tally.told[num_told[side.part.name] :]:
            tell(f"{'':12}{what}")
        num_told[side.part.name] = len(tally.told)
    tell("            MiB: " + "  ".join(f"{name} {size / MIB:.1f}" for name, size in sizes.items()))
