"""Membership of a worker in its cluster: its entry in the registry, and the time of the last contact."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from redis.exceptions import RedisError

from broker.cluster.registry import HEARTBEAT_S, Registry
from broker.transports.tensors import change_hosts
from common.keys import key_id
from common.messages import InstanceRecord
from common.telemetry import get_logger
from services.process.addresses import advertised
from services.process.drain import DrainState
from services.process.request_owners import RequestOwners
from services.worker_context import RoleService, WorkerContext

MAX_SILENCE_S: Final = 3 * HEARTBEAT_S
ANNOUNCE_WAIT_S: Final = 2 * HEARTBEAT_S

log = get_logger()


@dataclass(eq=False)
class Membership:
    """Membership from `join` to `exit`. Reports the load of `proxies`, the state of `drain` and the `figures`."""

    registry: Registry
    proxies: RequestOwners
    drain: DrainState
    figures: Callable[[], dict[str, float]]
    _joined: bool = False
    _joined_s: float = 0.0
    _last_contact_s: float = float("-inf")

    async def join(self, record: InstanceRecord) -> None:
        """Enter the registry. Raises like Registry.register."""
        self._joined_s = time.monotonic()
        await self.registry.register(record)
        self._joined = True
        self._last_contact_s = time.monotonic()

    @property
    def first_request_delay_s(self) -> float:
        """Seconds from the entry to the first request; 0 before the first request."""
        first_s = self.proxies.first_request_s
        return 0.0 if first_s is None else max(0.0, first_s - self._joined_s)

    async def beat(self) -> None:
        """Renew the entry. Raises like Registry.heartbeat."""
        await self._report()
        self._last_contact_s = time.monotonic()

    async def announce(self) -> None:
        """Announce at once that this worker is draining, or at a later beat after ANNOUNCE_WAIT_S in vain."""
        if not self._joined:
            return
        try:
            async with asyncio.timeout(ANNOUNCE_WAIT_S):
                await self._report()
        except (RedisError, TimeoutError) as error:
            log.warning("the broker cannot be told yet that this worker is draining", error=repr(error))

    async def exit(self) -> bool:
        """Remove the entry; False for a missing entry, or an entry of another process."""
        self._joined = False
        return await self.registry.unregister()

    def problem(self) -> str | None:
        """Return why others must not count on this worker; None if they may."""
        if not self._joined:
            return "not registered yet"
        if self.drain.requested:
            return "draining: it finishes what it has and takes nothing new"
        if time.monotonic() - self._last_contact_s > MAX_SILENCE_S:
            return "the broker is not reachable"
        return None

    async def _report(self) -> None:
        draining = self.drain.requested
        await self.registry.heartbeat(
            outstanding=len(self.proxies),
            outstanding_tokens=self.proxies.num_tokens,
            draining=draining,
            next_role=self.drain.next_role,
            figures=self.figures(),
        )
        if draining:
            self.drain.announced = True


def make_record(context: WorkerContext, role: RoleService, http_port: int, drain: DrainState) -> InstanceRecord:
    """Return a worker's entry for the registry, with addresses reachable by others."""
    reachable = partial(advertised, settings=context.settings)
    return InstanceRecord(
        instance_id=context.instance_id,
        role=role.role,
        epoch=context.epoch,
        model=context.info.name,
        fingerprint=context.info.fingerprint,
        dtype=context.dtype,
        http_address=reachable(f"http://{context.host}:{http_port}"),
        requests_address=reachable(context.server.address),
        key_id=key_id(context.settings),
        tensor_address=change_hosts(role.tensor_address, reachable),
        draining=drain.requested,
        next_role=drain.next_role,
        encodes=role.encodes,
    )
