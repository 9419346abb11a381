"""What can be done to a running cluster, and what a request may then end with."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from redis import Redis
from redis.exceptions import ConnectionError as BrokerGone

from common.messages import Role
from launch.cluster.local_cluster import LocalCluster
from proxy.dispatch.placement import WHOLE
from tests.chaos.faulty_link import Mode
from tests.chaos.network import Network
from tests.eventually import eventually
from tools.soak.asking import Ending

Kind = Literal["kill", "stop", "flush", "restart", "drop", "stall", "reset"]
"""SIGKILL; SIGSTOP and SIGCONT; the broker emptied, or ended properly so that it starts again empty; a cable cut."""
CUTS: tuple[Mode, ...] = ("drop", "stall", "reset")
BROKER = "broker"


@dataclass(frozen=True)
class Fault:
    """`kind` happens to `target` at `at_s` seconds, for `seconds` where it passes by.

    The target is an instance id or the broker; of cuts a cable: `e0>broker`, `>e0` for all that lead to an instance,
    `e0>pd0` for one link, or `<>e0` and `<>e0,pd0` for all that lead to and from instances, from and to everybody else.
    """

    kind: Kind
    target: str
    at_s: float
    seconds: float = 0.0

    @property
    def hit(self) -> set[str]:
        """Whom it strikes. A cable to the broker that is cut is no fault of the broker: the others reach it."""
        return set(filter(None, re.split("[<>,]", self.target.removesuffix(">broker"))))

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.kind} {self.target} at {self.at_s:.2f} s{lasting}"


class Breaker:
    """Does faults to one cluster and its network."""

    def __init__(self, cluster: LocalCluster, network: Network) -> None:
        self._cluster = cluster
        self._network = network

    async def run(self, faults: Sequence[Fault], on_strike: Callable[[], None] = lambda: None) -> None:
        """Do all of them, each in its time; returns when the last has passed. `on_strike` is called before each."""
        await asyncio.gather(*(self._do(fault, on_strike) for fault in faults))

    async def _do(self, fault: Fault, on_strike: Callable[[], None]) -> None:
        await asyncio.sleep(fault.at_s)
        on_strike()
        if fault.kind in ("flush", "restart"):
            await self._empty(fault.kind)
        elif fault.kind in ("kill", "stop"):
            await self._signal(fault)
        else:
            async with self.cut(fault.target, fault.kind):
                await asyncio.sleep(fault.seconds)

    async def _empty(self, kind: Kind) -> None:
        pid = self._pid(BROKER)
        with Redis.from_url(self._cluster.broker_url) as redis:
            if kind == "flush":
                await asyncio.to_thread(redis.flushall)
                return
            with contextlib.suppress(BrokerGone):  # there is no answer
                await asyncio.to_thread(redis.shutdown, nosave=True)
        await eventually(lambda: self._is_missed(BROKER, pid), 20.0)

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

    @contextlib.asynccontextmanager
    async def cut(self, target: str, mode: Mode) -> AsyncIterator[None]:
        """For as long as the caller likes."""
        await asyncio.to_thread(self._network.set, target, mode)
        try:
            yield
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
    """The workers that are hit while nobody who is not could do their work."""
    hit = {end for fault in faults for end in fault.hit}
    left = {instance.role for instance in cluster.instances.values() if instance.id not in hit}
    roles = set[Role]()
    if left.isdisjoint({"encoder", "encode_prefill_decode"}):
        roles |= {"encoder", "encode_prefill_decode"}
    if left.isdisjoint(WHOLE) and not {"prefill", "decode"} <= left:
        roles |= {"prefill", "decode", *WHOLE}
    return {instance.id for instance in cluster.instances.values() if instance.id in hit and instance.role in roles}


def allowed_endings(faults: Sequence[Fault], cluster: LocalCluster) -> set[Ending]:
    """How a request may end. One that does not get its answer must have been hit where nobody could take over: that is
    where the broker itself is, or those that alone could have done a worker's part.
    """
    allowed: set[Ending] = {"whole"}
    if any(fault.target == BROKER for fault in faults) or irreplaceable(faults, cluster):
        allowed.add("refused")
    if any(fault.target == "proxy" and fault.kind == "kill" for fault in faults):
        allowed.add("closed")
    return allowed
