"""What can be done to a running cluster, and what a request may then end with."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from redis import Redis

from launch.cluster import LocalCluster
from launch.soak.asking import Ending
from tests.chaos.cable import Mode
from tests.chaos.network import Network
from tests.eventually import eventually

Kind = Literal["kill", "stop", "flush", "drop", "stall", "reset"]
CUTS: tuple[Mode, ...] = ("drop", "stall", "reset")
BROKER = "broker"


@dataclass(frozen=True)
class Fault:
    """`kind` happens to `target` at `at_s` seconds, for `seconds` where it passes by.

    The target is an instance id or the broker; of cuts a cable: `e0>broker`, or `>e0` for all that lead to an instance.
    """

    kind: Kind
    target: str
    at_s: float
    seconds: float = 0.0

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.kind} {self.target} at {self.at_s:.2f} s{lasting}"


class Breaker:
    """Does faults to one cluster and its network."""

    def __init__(self, cluster: LocalCluster, network: Network) -> None:
        self._cluster = cluster
        self._network = network

    async def run(self, faults: Sequence[Fault]) -> None:
        """Do all of them, each in its time; returns when the last has passed."""
        await asyncio.gather(*(self._do(fault) for fault in faults))

    async def _do(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at_s)
        if fault.kind == "flush":
            await asyncio.to_thread(self._flush)
        elif fault.kind in ("kill", "stop"):
            await self._signal(fault)
        else:
            await self._cut(fault.target, fault.kind, fault.seconds)

    def _flush(self) -> None:
        with Redis.from_url(self._cluster.broker_url) as redis:
            redis.flushall()

    async def _signal(self, fault: Fault) -> None:
        pid = self._pid(fault.target)
        if fault.kind == "kill":
            os.kill(pid, signal.SIGKILL)
            await eventually(lambda: self._is_missed(fault.target, pid))  # from now on it is not called ready
            return
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):  # another fault may have killed it
                os.kill(pid, signal.SIGCONT)

    async def _cut(self, target: str, mode: Mode, seconds: float) -> None:
        await asyncio.to_thread(self._network.set, target, mode)
        try:
            await asyncio.sleep(seconds)
        finally:
            await asyncio.to_thread(self._network.set, target, "pass")

    def _pid(self, target: str) -> int:
        pid = self._cluster.supervisor.broker_pid if target == BROKER else self._cluster.instances[target].pid
        assert pid is not None, f"{target} does not run"
        return pid

    def _is_missed(self, target: str, pid: int) -> bool:
        if target == BROKER:
            return self._cluster.supervisor.broker_pid != pid
        instance = self._cluster.instances[target]
        return instance.state != "ready" or instance.pid not in (pid, None)


def irreplaceable(faults: Sequence[Fault], cluster: LocalCluster) -> set[str]:
    """The instances that are hit while there is no other of their role that is not."""
    hit = _hit(faults)
    left = Counter(instance.role for instance in cluster.instances.values() if instance.id not in hit)
    return {instance.id for instance in cluster.instances.values() if left[instance.role] == 0}


def allowed_endings(faults: Sequence[Fault], cluster: LocalCluster) -> set[Ending]:
    """How a request may end. One that does not get its answer must have been hit where nobody could take over."""
    allowed: set[Ending] = {"whole"}
    if BROKER in _hit(faults) or irreplaceable(faults, cluster):
        allowed.add("refused")
    if any(fault.target == "proxy" and fault.kind == "kill" for fault in faults):
        allowed.add("closed")
    return allowed


def _hit(faults: Sequence[Fault]) -> set[str]:
    return {end for fault in faults for end in fault.target.split(">")}


def draw_faults(rng: random.Random, instance_ids: Sequence[str], stop_s: float) -> list[Fault]:
    """One or two faults of any kind on any of the instances, the proxy and the broker."""
    faults = []
    for target in rng.sample([*instance_ids, BROKER], rng.choice((1, 1, 2))):
        kinds: tuple[Kind, ...] = ("kill", "stop", "flush") if target == BROKER else ("kill", "stop")
        kind = rng.choice(kinds)
        if target not in (BROKER, "proxy") and rng.random() < 0.5:
            kind, target = rng.choice(CUTS), rng.choice((f"{target}>broker", f">{target}"))
        lasting = rng.uniform(0.3, 1.0) * stop_s if kind not in ("kill", "flush") else 0.0
        faults.append(Fault(kind, target, rng.uniform(0.0, 3.0), lasting))
    return faults
