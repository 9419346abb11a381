"""The workers of a running cluster, seen and controlled from outside: status, drain, switch."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Final

import httpx
import msgspec
from redis.exceptions import RedisError
from rich.table import Table

from broker.cluster.redis_client import connect, wait_until_reachable
from broker.cluster.registry import Registry, incompatibility
from common.config import Settings
from common.errors import TriptychError, invalid
from common.keys import bearer, cluster_token
from common.messages import InstanceRecord, Role
from launch.cli.console import make_console, make_table

BROKER_TIMEOUT_S: Final = 3.0
_HTTP_TIMEOUT_S: Final = 5.0
_POLL_S: Final = 0.1

Tell = Callable[[str], None]
"""Takes a line for a person."""
Done = Callable[[InstanceRecord, InstanceRecord | None], Awaitable[bool]]
"""Whether what was asked of a worker has come about, by its record before and the one of now, if it has one."""


class Members:
    """The registry of a cluster and the endpoints of its workers, as an asynchronous context manager."""

    def __init__(self, settings: Settings) -> None:
        """Connect to the broker of `settings`, with the cluster's key. Raises TriptychError for an unreadable key."""
        assert settings.broker is not None
        token = cluster_token(settings)
        headers = {} if token is None else {"Authorization": bearer(token)}
        self._cluster = settings.cluster
        self._redis = connect(settings.broker)
        self._registry = Registry(self._redis, settings.cluster)
        self._http = httpx.AsyncClient(headers=headers, timeout=_HTTP_TIMEOUT_S, trust_env=False)

    async def __aenter__(self) -> Members:
        """Raises TriptychError("unavailable") where the broker does not answer."""
        await wait_until_reachable(self._redis, BROKER_TIMEOUT_S)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()
        await self._redis.aclose()

    async def records(self) -> dict[str, InstanceRecord]:
        """Return the registry's entry of every instance, by id. Raises TriptychError("unavailable") without the
        broker."""
        try:
            return await self._registry.instances()
        except RedisError as error:
            raise TriptychError("unavailable", f"the broker does not answer: {error}") from error

    async def find(self, instance_id: str, *, or_proxy: bool = False) -> InstanceRecord:
        """Return the record of a worker, or of a proxy. Raises TriptychError("invalid_request") with the known ids."""
        records = await self.records()
        known = sorted(name for name, record in records.items() if or_proxy or record.role != "proxy")
        if instance_id in known:
            return records[instance_id]
        what, has = "worker or proxy" if or_proxy else "worker", ", ".join(known) or "none"
        message = f"there is no {what} {instance_id!r} in cluster {self._cluster!r} now: it has {has}"
        raise invalid(message, "id")

    async def drain(self, instance_id: str, timeout_s: float, tell: Tell) -> None:
        """Let a worker finish all work and leave; return after the worker is gone.

        Raises TriptychError: no such worker, it refuses, it still has requests after `timeout_s` seconds, or it has
        died instead, and another process has taken its place.
        """
        record = await self.find(instance_id, or_proxy=True)
        if record.role == "proxy":
            await self._drain_proxy(record, timeout_s, tell)
            return
        await self._ask("POST", record, "drain")
        await self._watch(record, timeout_s, tell, self._has_left)
        tell(f"{instance_id} has left")

    async def _drain_proxy(self, record: InstanceRecord, timeout_s: float, tell: Tell) -> None:
        """Return once a proxy has nothing under way. Raises TriptychError where some is left after `timeout_s`."""
        answer = await self._ask("POST", record, f"drain?wait={timeout_s:g}", wait_s=timeout_s)
        if (left := int(answer.json()["outstanding"])) > 0:
            message = (
                f"{record.instance_id}: after {timeout_s:g} s it still has {_requests(left)}, and goes on draining"
            )
            raise TriptychError("timeout", message)
        tell(f"{record.instance_id} has nothing under way; end it by SIGTERM")

    async def switch(self, instance_id: str, role: Role, timeout_s: float, tell: Tell) -> None:
        """Let a worker finish all work and come back in another role; return when the worker is ready.

        Raises TriptychError as `drain` does, and where the worker cannot have that role.
        """
        record = await self.find(instance_id)
        await self._ask("POST", record, "switch", {"role": role})

        async def is_back(before: InstanceRecord, now: InstanceRecord | None) -> bool:
            if now is None or now.epoch == before.epoch:
                return False
            if now.role != role:
                raise _started_again(now, "switch")
            return await self._answers(now)

        await self._watch(record, timeout_s, tell, is_back)
        tell(f"{instance_id} has the role {role} now")

    async def show_handoffs(self, tell: Tell) -> None:
        """Tell the hops of the last handoffs. Raises TriptychError where a worker does not answer."""
        from services.process.handoff_trace import hop_latencies, summary

        workers = [record for record in (await self.records()).values() if record.role != "proxy"]
        sides = [(await self._ask("GET", worker, "debug/handoffs")).json() for worker in workers]
        tell(summary(hop_latencies(sides)))

    async def show_status(self, *, as_json: bool) -> None:
        """Print the status. Raises as `records` does."""
        records = sorted((await self.records()).values(), key=lambda record: (record.role, record.instance_id))
        if as_json:
            print(json.dumps([msgspec.to_builtins(record) for record in records], indent=2))
            return
        console = make_console()
        if not records:
            console.print(f"nobody is in cluster {self._cluster!r}", highlight=False)
            return
        refused = refusals(records)
        console.print(status_table(records, f"{self._cluster}: {records[0].model}", time.time(), refused))
        for why in refused.values():
            console.print(f"not used: {why}", style="red", highlight=False, soft_wrap=True)

    async def _ask(
        self, method: str, record: InstanceRecord, path: str, body: dict[str, str] | None = None, *, wait_s: float = 0.0
    ) -> httpx.Response:
        url = f"{record.base_url}/{path}"
        try:
            response = await self._http.request(method, url, json=body, timeout=_HTTP_TIMEOUT_S + wait_s)
        except httpx.HTTPError as error:
            message = f"{record.instance_id} does not answer at {url}: {error!r}"
            raise TriptychError("unavailable", message) from error
        if response.status_code == httpx.codes.UNAUTHORIZED:
            message = f"{record.instance_id} wants the cluster's key: set TRIPTYCH_CLUSTER_KEY or --cluster-key-file"
            raise invalid(message, "cluster_key")
        if response.is_error:
            raise invalid(f"{record.instance_id}: {_reason(response)}", "role")
        return response

    async def _watch(self, record: InstanceRecord, timeout_s: float, tell: Tell, done: Done) -> None:
        """Tell each change in the number of requests left, until `done(record, its record now)`."""
        deadline_s, told = time.monotonic() + timeout_s, None
        while True:
            now = (await self.records()).get(record.instance_id)
            if await done(record, now):
                return
            left = now.outstanding if now is not None and now.epoch == record.epoch else None
            if left != told and left is not None:
                tell(f"{record.instance_id} is draining: {_requests(left)} left")
            told = left
            if time.monotonic() > deadline_s:
                what = "it is not back" if left is None else f"it still has {_requests(left)}, and goes on draining"
                raise TriptychError("timeout", f"{record.instance_id}: after {timeout_s:g} s {what}")
            await asyncio.sleep(_POLL_S)

    async def _has_left(self, before: InstanceRecord, now: InstanceRecord | None) -> bool:
        """Return whether the worker is gone from the registry and deaf: a broker may have forgotten a living worker."""
        if now is not None and now.epoch != before.epoch:
            raise _started_again(now, "drain")
        return now is None and not await self._answers(before)

    async def _answers(self, record: InstanceRecord) -> bool:
        try:
            await self._http.get(f"{record.base_url}/health")
        except httpx.HTTPError:
            return False
        return True


def _requests(count: int) -> str:
    return f"{count} request{'' if count == 1 else 's'}"


def _started_again(now: InstanceRecord, command: str) -> TriptychError:
    message = f"{now.instance_id} died before it was done, and has been started again as {now.role}: {command} it anew"
    return TriptychError("unavailable", message)


def _reason(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP status {response.status_code}"


def refusals(records: Collection[InstanceRecord]) -> dict[str, str]:
    """Return the workers not used by a proxy of the cluster, each with the reason."""
    proxies = [record for record in records if record.role == "proxy"]
    return {
        worker.instance_id: why
        for worker in records
        for proxy in proxies
        if (why := incompatibility(worker, proxy)) is not None and worker.role != "proxy"
    }


def status_table(records: Iterable[InstanceRecord], title: str, now_s: float, refused: Collection[str] = ()) -> Table:
    """Return a table with a row per instance; `now_s` is Unix time, `refused` are ids. An instance's epoch is the
    moment of the start."""
    table = make_table(title, ("id", "role", "epoch", "up", "requests", "tokens", "http", "state"))
    for one in records:
        table.add_row(
            one.instance_id,
            one.role,
            str(one.epoch),
            _duration(now_s - one.epoch / 1e9),
            str(one.outstanding),
            str(one.outstanding_tokens),
            one.http_address.rpartition("://")[2],
            _state(one, refused),
        )
    return table


def _state(one: InstanceRecord, refused: Collection[str]) -> str:
    if one.instance_id in refused:
        return "[red]not used[/]"
    if not one.draining:
        return "[green]ready[/]"
    return "[yellow]draining[/]" if one.next_role is None else f"[yellow]draining[/], then {one.next_role}"


def _duration(seconds: float) -> str:
    """`42 s`, `7 min` or `3.2 h`."""
    if seconds < 60:
        return f"{max(0, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
