"""The supervisor's questions to broker and instances: presence, readiness, leftovers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import get_args

import httpx
from redis.exceptions import RedisError

from broker.cluster.redis_client import connect, wait_until_reachable, without_secrets
from broker.cluster.registry import Registry
from broker.handoff.channels import ChannelName, stream_key
from common.errors import TriptychError, invalid
from common.messages import InstanceRecord
from launch.cluster.instance import Instance, State
from launch.cluster.plan import PROXY_ID, Plan

_BROKER_TIMEOUT_S = 3.0


class ReadinessProbe:
    """A reader of the registry, for addresses and planned departures, and of the /ready endpoints."""

    def __init__(self, broker_url: str, cluster: str) -> None:
        self._redis = connect(broker_url)
        self._registry = Registry(self._redis, cluster)
        self._http = httpx.AsyncClient(timeout=2.0, trust_env=False)
        self._present: set[str] = set()
        self.broker_away = False
        """Whether the registry could not be read at the last look."""

    async def __aenter__(self) -> ReadinessProbe:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()
        await self._redis.aclose()

    async def changes(self, instances: Sequence[Instance]) -> list[tuple[Instance, State]]:
        """Return the instances that changed state by themselves, with the new state; fill in addresses and roles.

        A worker that came back counts once the proxy can serve again, too: it may not have found the new one yet.
        """
        looked_at = [one for one in instances if one.state in ("starting", "ready", "draining", "switching")]
        try:
            records = await self._registry.instances() if looked_at else {}
        except (RedisError, OSError):
            self._present, self.broker_away = set(), True
            return []  # the broker is away for a moment; the next look may find it
        self.broker_away = False
        self._present = set(records)
        leaving = [(one, state) for one in looked_at if (state := _departure(one, records.get(one.id))) is not None]
        starting = [one for one in looked_at if one.state in ("starting", "switching")]
        for instance in starting:
            _note_addresses(instance, records.get(instance.id))
        if leaving:
            return leaving  # before anybody is asked anything: they may end meanwhile, and be taken for dead
        # Who has joined since the registry was read waits for the next look: its entry would pass for another role's.
        asked = [(instance, instance.child) for instance in starting if instance.joined]
        ready = [instance for instance, _ in asked if await self._is_ready(instance)]
        if any(instance.restarts for instance in ready):
            proxies = [instance for instance in instances if instance.role == "proxy"]
            if not all([await self._is_ready(proxy) for proxy in proxies]):
                ready = [instance for instance in ready if not instance.restarts]
        lives = {one.id for one, child in asked if one.child is child and one.state in ("starting", "switching")}
        return [(one, "ready") for one in ready if one.id in lives]

    async def heard(self, instances: Sequence[Instance]) -> set[str]:
        """Return the ids of instances with a sign of life: an entry in the registry, just read by `changes`, or an HTTP
        answer."""
        asked = [one for one in instances if one.id not in self._present and one.pid is not None and one.http_address]
        answers = await asyncio.gather(*(self._get(one, "health") for one in asked))
        return self._present | {one.id for one, answer in zip(asked, answers, strict=True) if answer is not None}

    async def _is_ready(self, instance: Instance) -> bool:
        answer = await self._get(instance, "ready") if instance.http_address else None
        return answer is not None and answer.is_success

    async def _get(self, instance: Instance, path: str) -> httpx.Response | None:
        """Return an instance's answer; None without any."""
        try:
            return await self._http.get(f"{instance.http_address}/{path}")
        except httpx.HTTPError:
            return None


def _departure(instance: Instance, record: InstanceRecord | None) -> State | None:
    """Return the new state of a worker that has begun to leave, or is coming back in another role; None otherwise.

    It may be told before it counts as ready here: an entry in the registry is enough. A proxy does not end by a drain.
    """
    if record is None or record.epoch == instance.past_epoch or instance.role == "proxy":
        return None
    settled = instance.state in ("ready", "draining")
    if instance.joined and record.epoch != instance.epoch and (settled or record.role != instance.role):
        instance.take_role(record.role)
        return "switching"
    if not record.draining or instance.state == "draining":
        return None
    instance.next_role = record.next_role
    return "draining"


def _note_addresses(instance: Instance, record: InstanceRecord | None) -> None:
    if record is None or record.epoch == instance.past_epoch:
        return
    instance.epoch = record.epoch
    instance.requests_address, instance.tensor_address = record.requests_address, record.tensor_address
    if instance.role != "proxy":  # the proxy's was given
        instance.http_address = record.base_url


async def check_broker(broker_url: str, plan: Plan) -> None:
    """Check a foreign broker before any process starts.

    Raises TriptychError("unavailable") where it does not answer, and "invalid_request" where instances of the same
    names already run under this cluster's prefix.
    """
    cluster = plan.settings.cluster
    try:
        async with connect(broker_url, retries=0) as redis:
            await wait_until_reachable(redis, _BROKER_TIMEOUT_S)
            running = await Registry(redis, cluster).instances()
    except RedisError as error:
        raise TriptychError("unavailable", f"the broker does not answer: {error}", "broker") from error
    taken = sorted(running.keys() & {PROXY_ID, *(instance_id for instance_id, _ in plan.topology.workers())})
    if taken:
        where = f"cluster {cluster!r} at {without_secrets(broker_url)}"
        message = f"{where} already runs {', '.join(taken)}: give this one another --cluster"
        raise invalid(message, "cluster")


async def forget_instances(broker_url: str, cluster: str, instances: Sequence[Instance]) -> None:
    """Remove the entries of instances that did not stop cleanly; a clean stop leaves no entries."""
    ids = [instance.id for instance in instances]
    keys = [stream_key(cluster, instance_id, channel) for instance_id in ids for channel in get_args(ChannelName)]
    with contextlib.suppress(RedisError, OSError):  # the broker is gone, and what was in it
        async with connect(broker_url, retries=0) as redis:
            await redis.delete(*keys, *(f"{cluster}:instance:{instance_id}" for instance_id in ids))
            await redis.srem(f"{cluster}:instances", *ids)
