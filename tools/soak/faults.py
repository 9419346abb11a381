"""What a soak does to its cluster now and then. Some processes are spared, so that theirs is a life to measure."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
from collections import Counter
from typing import TYPE_CHECKING, Final

from redis import Redis

from tools.bench.measure import emit

if TYPE_CHECKING:
    from launch.cluster.instance import Instance
    from launch.cluster.local_cluster import LocalCluster

STOPS_S: Final = (3.0, 6.0, 12.0)
"""How long a stopped process stands still: the last is longer than a worker lives in the registry without a word."""


class Faults:
    """Kills and stops all workers but the first of each role, and empties the broker, at random moments."""

    def __init__(self, cluster: LocalCluster, rng: random.Random, mean_interval_s: float) -> None:
        self._cluster = cluster
        self._rng = rng
        self._mean_interval_s = mean_interval_s
        self.counts: Counter[str] = Counter()

    async def run(self) -> None:
        """Break things until cancelled; nothing with an interval of 0."""
        while self._mean_interval_s:
            await asyncio.sleep(self._rng.uniform(0.5, 1.5) * self._mean_interval_s)
            await self._one()

    async def _one(self) -> None:
        victims = [i for i in self._cluster.instances.values() if not is_spared(i)]
        ready = [instance for instance in victims if instance.state == "ready" and instance.pid is not None]
        kind = self._rng.choice(("kill", "kill", "stop", "flush"))
        if kind == "flush":
            emit("emptying the broker")
            await asyncio.to_thread(self._flush)
        elif ready:
            victim = self._rng.choice(ready)
            await self._hit(victim, kind)
        else:
            return
        self.counts[kind] += 1

    async def _hit(self, victim: Instance, kind: str) -> None:
        if kind == "kill":
            emit(f"kill {victim.id}")
            send_signal(victim, signal.SIGKILL)
            return
        seconds = self._rng.choice(STOPS_S)
        emit(f"stop {victim.id} for {seconds:g} s")
        send_signal(victim, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            send_signal(victim, signal.SIGCONT)

    def _flush(self) -> None:
        with Redis.from_url(self._cluster.broker_url) as redis:
            redis.flushall()


def is_spared(instance: Instance) -> bool:
    """Whether it is never hit: the proxy, and the first worker of each role."""
    return instance.role == "proxy" or re.fullmatch(r"\D+0", instance.id) is not None


def send_signal(instance: Instance, number: signal.Signals) -> None:
    """To its present process, should it have one."""
    if (pid := instance.pid) is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
