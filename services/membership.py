"""A worker's place in its cluster: what it says of itself in the registry, and when it last heard from there."""

from __future__ import annotations

import asyncio
import time
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
TELL_S: Final = 2 * HEARTBEAT_S

log = get_logger()


class Membership:
    """From `join` to `leave`. The load that it reports is that of `proxies`, the readiness that of `departure`."""

    def __init__(self, registry: Registry, proxies: RequestOwners, departure: DrainState) -> None:
        self._registry = registry
        self._proxies = proxies
        self._departure = departure
        self._joined = False
        self._joined_s = 0.0
        self._last_contact_s = float("-inf")

    async def join(self, record: InstanceRecord) -> None:
        """Enter the registry. Raises as Registry.register does."""
        self._joined_s = time.monotonic()
        await self._registry.register(record)
        self._joined = True
        self._last_contact_s = time.monotonic()

    @property
    def first_request_delay_s(self) -> float:
        """From entering the registry to the first request, in seconds; 0 before that."""
        first_s = self._proxies.first_request_s
        return 0.0 if first_s is None else max(0.0, first_s - self._joined_s)

    async def beat(self) -> dict[str, InstanceRecord]:
        """Renew the entry; returns all instances. Raises as Registry.heartbeat does."""
        await self._tell()
        self._last_contact_s = time.monotonic()
        return await self._registry.instances()

    async def announce(self) -> None:
        """Say now that this worker is draining; without a broker, the next beat that finds one does. Waits for it for
        TELL_S at most."""
        if not self._joined:
            return
        try:
            async with asyncio.timeout(TELL_S):
                await self._tell()
        except (RedisError, TimeoutError) as error:
            log.warning("the broker cannot be told yet that this worker is draining", error=repr(error))

    async def leave(self) -> bool:
        """Remove the entry; False if there is none, or another process has taken it over."""
        self._joined = False
        return await self._registry.unregister()

    def problem(self) -> str | None:
        """Why nobody should count on this worker; None if they may."""
        if not self._joined:
            return "not registered yet"
        if self._departure.requested:
            return "draining: it finishes what it has and takes nothing new"
        if time.monotonic() - self._last_contact_s > MAX_SILENCE_S:
            return "the broker is not reachable"
        return None

    async def _tell(self) -> None:
        draining = self._departure.requested
        await self._registry.heartbeat(
            outstanding=len(self._proxies),
            outstanding_tokens=self._proxies.num_tokens,
            draining=draining,
            next_role=self._departure.next_role,
        )
        if draining:
            self._departure.announced()


def make_record(
    links: WorkerContext, role: RoleService, http_port: int, departure: DrainState | None = None
) -> InstanceRecord:
    """What a worker says of itself, with addresses as others reach them."""
    settings = links.settings

    def tell(address: str) -> str:
        return advertised(address, settings.advertise_host)

    return InstanceRecord(
        instance_id=links.instance_id,
        role=role.role,
        epoch=links.epoch,
        model=links.info.name,
        fingerprint=links.info.fingerprint,
        dtype=links.dtype,
        http_address=tell(f"http://{links.host}:{http_port}"),
        requests_address=tell(links.server.address),
        key_id=key_id(settings),
        tensor_address=change_hosts(role.tensor_address, tell),
        draining=departure is not None and departure.requested,
        next_role=None if departure is None else departure.next_role,
        encodes=role.encodes,
    )
