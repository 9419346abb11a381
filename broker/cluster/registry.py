"""The registry of live instances: every instance keeps a short-lived record in Redis.

{cluster}:instances                the ids of all instances (a set)
{cluster}:instance:{instance_id}   an InstanceRecord, gone RECORD_TTL_S seconds after the last heartbeat
{cluster}:changes                  a pub/sub channel: an empty message when an instance comes, begins to leave or has
                                   left, so that readers that poll the registry can look at once; a Placed message
                                   when one of several proxies has placed a prompt
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Collection, Iterable
from typing import Final

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from broker.cluster.redis_client import own_host
from common.config import Settings
from common.errors import TriptychError
from common.messages import InstanceRecord, Placed, Role, decode_placed, decode_record, encode
from common.telemetry import get_logger

RECORD_TTL_S: Final = 5
HEARTBEAT_S: Final = 1.0
ABSENCE_S: Final = 3.0
BLIND_S: Final = 2.0
"""Longer than this between two looks at the registry, it could not be seen."""
_LISTEN_S: Final = 1.0
"""One wait for news, shorter than the client's patience with a server that says nothing."""

log = get_logger()


def reachable_host(bound: str, settings: Settings) -> str:
    """Return the host for others of a socket that is bound to the host `bound`, perhaps to all of this machine's."""
    if settings.advertise_host:
        return settings.advertise_host
    return own_host(settings.broker) if bound in ("0.0.0.0", "::") else bound


class Registry:
    """The instances of one cluster and, after `register`, this process's own entry."""

    def __init__(self, redis: Redis, cluster: str) -> None:
        self._redis = redis
        self._cluster = cluster
        self._index = f"{cluster}:instances"
        self._changes = f"{cluster}:changes"
        self._own: InstanceRecord | None = None
        self._published: tuple[int, bool] | None = None  # epoch, draining
        self._beat_s = float("inf")  # when the broker last answered a heartbeat
        self._unreadable: dict[str, str] = {}  # why, by the ids of entries

    async def register(self, record: InstanceRecord) -> None:
        """Enter `record`, or take over the entry of the same id. Keep it alive by `heartbeat`, which raises alike."""
        self._own = record
        await self.heartbeat()

    async def heartbeat(self, **changes: int | Role | dict[str, float] | None) -> None:
        """Write the own record again, with `changes` of its fields.

        Raises TriptychError("unavailable") where a younger process runs under the same instance id.
        """
        if self._own is None:
            raise TriptychError("internal_error", "heartbeat before register")
        own = self._own = msgspec.structs.replace(self._own, **changes)
        rival = await self.get(own.instance_id)
        if rival is not None and rival.epoch > own.epoch:
            self._own = None  # the entry is the other's
            message = f"another process has taken the instance id {own.instance_id!r}; give each its own --instance-id"
            raise TriptychError("unavailable", message, "instance_id")
        if (latest := self._own) is None:
            return  # it has left meanwhile
        own = latest  # which may say by now that it drains
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.set(self._key(own.instance_id), encode(own), ex=RECORD_TTL_S)
            pipe.sadd(self._index, own.instance_id)
            await pipe.execute()
        if (away_s := time.monotonic() - self._beat_s) > BLIND_S:
            log.info("in touch with the broker again", away_s=round(away_s, 1))
        self._beat_s = time.monotonic()
        if self._published != (own.epoch, own.draining):
            await self._publish()
            self._published = own.epoch, own.draining

    async def unregister(self) -> bool:
        """Remove the own entry; return False if the entry is gone or belongs to another process by now."""
        own, self._own = self._own, None
        if own is None:
            return False
        current = await self.get(own.instance_id)
        if current is not None and current.epoch != own.epoch:
            return False
        await self._redis.delete(self._key(own.instance_id))
        await self._redis.srem(self._index, own.instance_id)
        await self._publish()
        self._published = None
        return True

    async def changes(self) -> AsyncGenerator[Placed | None]:
        """Yield None at the start, and after an instance joins, begins to leave or leaves; else what a proxy tells.
        Poll as well: a death sends no notification, and a lost connection loses some.

        Raises ResponseError where the broker does not let us listen.
        """
        async with self._redis.pubsub() as listener:
            await listener.subscribe(self._changes)
            while True:
                message = await listener.get_message(timeout=_LISTEN_S)
                if message is None:
                    continue
                try:
                    yield decode_placed(message["data"]) if message["type"] == "message" and message["data"] else None
                except TriptychError as error:
                    log.warning("unreadable news of another proxy", cluster=self._cluster, error=error.info.message)

    async def tell(self, placed: Placed) -> None:
        """Tell all listeners where a prompt was placed, as far as the broker lets us."""
        await self._publish(encode(placed))

    async def _publish(self, data: bytes = b"") -> None:
        with contextlib.suppress(RedisError):  # no right to, or no such command: those that listen look by themselves
            await self._redis.publish(self._changes, data)

    async def get(self, instance_id: str) -> InstanceRecord | None:
        """Return an instance's record; None if the instance is not alive."""
        return self._parse(instance_id, await self._redis.get(self._key(instance_id)))

    async def instances(self) -> dict[str, InstanceRecord]:
        """Return all live instances by id."""
        members = await self._redis.smembers(self._index)
        ids = sorted(m.decode(errors="replace") if isinstance(m, bytes) else m for m in members)
        return await self.find(ids)

    async def find(self, ids: Iterable[str]) -> dict[str, InstanceRecord]:
        """Return those of some instances that are alive, by id, and remove expired ids from the index."""
        names = list(ids)
        values = await self._redis.mget([self._key(name) for name in names]) if names else []
        if expired := [name for name, value in zip(names, values, strict=True) if value is None]:
            await self._redis.srem(self._index, *expired)  # one that is alive enters itself again by its next heartbeat
        records = map(self._parse, names, values)
        return {record.instance_id: record for record in records if record is not None}

    def _key(self, instance_id: str) -> str:
        return f"{self._cluster}:instance:{instance_id}"

    def _parse(self, instance_id: str, value: bytes | str | None) -> InstanceRecord | None:
        told = self._unreadable.pop(instance_id, None)
        if value is None:
            return None
        try:
            return decode_record(value if isinstance(value, bytes) else value.encode())
        except TriptychError as error:
            self._unreadable[instance_id] = why = error.info.message
            if why != told:
                log.warning("unreadable registry entry", cluster=self._cluster, entry=instance_id, error=why)
            return None


class Presence:
    """Count an instance as gone after ABSENCE_S without an entry. A restart of Redis empties the registry for a moment
    and ends no handoff. Time with an unreachable broker does not count beyond the usual interval between two looks."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[InstanceRecord, float]] = {}
        self._looked_s = time.monotonic()

    @property
    def ids(self) -> Collection[str]:
        return self._seen.keys()

    def note(self, record: InstanceRecord) -> None:
        """Note that this instance has just been seen."""
        self._seen[record.instance_id] = record, time.monotonic()

    def get(self, instance_id: str) -> InstanceRecord | None:
        """Return an instance seen within the last ABSENCE_S seconds, or None."""
        record, seen_s = self._seen.get(instance_id, (None, 0.0))
        return record if time.monotonic() - seen_s < ABSENCE_S else None

    def look(self, instances: dict[str, InstanceRecord]) -> dict[str, InstanceRecord]:
        """Record which of the seen instances are alive; return those present. Called with the heartbeat."""
        now_s = time.monotonic()
        if (between_s := now_s - self._looked_s) > BLIND_S:
            blind_s = between_s - HEARTBEAT_S
            self._seen = {i: (record, min(now_s, seen_s + blind_s)) for i, (record, seen_s) in self._seen.items()}
        self._looked_s = now_s
        self._seen.update({instance_id: (record, now_s) for instance_id, record in instances.items()})
        self._seen = {i: seen for i, seen in self._seen.items() if now_s - seen[1] < ABSENCE_S}
        return {i: record for i, (record, _) in self._seen.items()}


def incompatibility(one: InstanceRecord, other: InstanceRecord) -> str | None:
    """Return the reason against two instances working together; None if compatible. A proxy has no dtype."""
    if one.key_id != other.key_id:
        has = f"cluster key {one.key_id}" if one.key_id else "no cluster key"
        wants = f"cluster key {other.key_id}" if other.key_id else "none"
        return f"{one.instance_id} has {has}, {other.instance_id} has {wants}: give both the same TRIPTYCH_CLUSTER_KEY"
    for name, ours, theirs in (
        ("protocol version", one.protocol, other.protocol),
        ("dtype", one.dtype, other.dtype),
        ("model fingerprint", one.fingerprint, other.fingerprint),
    ):
        if ours != theirs and not (name == "dtype" and "proxy" in (one.role, other.role)):
            wanted = "the same version of Triptych" if name == "protocol version" else "the same model and dtype"
            return (
                f"{one.instance_id} (model {one.model}) has {name} {ours}, "
                f"{other.instance_id} (model {other.model}) has {theirs}: start both with {wanted}"
            )
    return None
