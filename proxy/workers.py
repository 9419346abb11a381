"""The workers that this proxy talks to: found in the registry, one connection each, gone when the registry says so."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import Final, Protocol

import zmq.asyncio
from redis.exceptions import RedisError

from broker.registry import HEARTBEAT_S, RECORD_TTL_S, Registry, incompatibility
from broker.rpc import WorkerClient
from common.errors import TriptychError
from common.messages import FromWorker, Heartbeat, InstanceRecord, Role, ToWorker
from common.telemetry import get_logger

POLL_S: Final = 0.5

log = get_logger()


@dataclass
class Load:
    """What this proxy has under way on one worker: requests (items on an encoder) and their tokens (bytes)."""

    requests: int = 0
    size: int = 0


@dataclass(eq=False)
class Worker:
    """One life of one worker process; a restarted worker is another `Worker`."""

    record: InstanceRecord
    client: WorkerClient
    load: Load = field(default_factory=Load)
    gone: bool = False

    @property
    def instance_id(self) -> str:
        return self.record.instance_id

    async def send(self, message: ToWorker) -> None:
        """Send without waiting. Raises TriptychError("unavailable") where the worker takes nothing any more."""
        if self.gone:
            raise TriptychError("unavailable", f"{self.instance_id} is gone")
        await self.client.send(message)


class Listener(Protocol):
    """Who is told what the workers say, and that one is gone."""

    async def on_message(self, worker: Worker, message: FromWorker) -> None: ...

    async def on_gone(self, worker: Worker) -> None: ...


class WorkerPool:
    """Keeps one connection per live, compatible worker, and this proxy's own entry in the registry.

    `own` is the proxy's record; workers whose model fingerprint or protocol differ from it are not used.
    """

    def __init__(self, registry: Registry, own: InstanceRecord, listener: Listener) -> None:
        self.own = own
        self._registry = registry
        self._listener = listener
        self._context = zmq.asyncio.Context()
        self._workers: dict[str, Worker] = {}
        self._receivers: dict[Worker, asyncio.Task[None]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._refused: dict[str, str] = {}
        self._forgotten_until_s = 0.0
        self._last_poll_s = float("-inf")

    async def start(self) -> None:
        """Look once, then keep looking; returns at once where the broker is not there yet."""
        self._tasks = [asyncio.create_task(self._watch_registry()), asyncio.create_task(self._send_heartbeats())]

    async def close(self) -> None:
        """Stop, close every connection and leave the registry."""
        for task in (*self._tasks, *self._receivers.values()):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._receivers.values(), return_exceptions=True)
        for worker in self._workers.values():
            worker.gone = True
            worker.client.close()
        self._workers.clear()
        self._receivers.clear()
        self._context.term()
        with contextlib.suppress(RedisError, TriptychError, TimeoutError):
            async with asyncio.timeout(1.0):  # without a broker the entry expires by itself
                await self._registry.unregister()

    @property
    def broker_reachable(self) -> bool:
        return time.monotonic() - self._last_poll_s < 2 * HEARTBEAT_S + POLL_S

    @property
    def refused(self) -> dict[str, str]:
        """Workers that are not used, and why."""
        return dict(self._refused)

    def workers(self, role: Role, *, matching: Worker | None = None) -> list[Worker]:
        """Live workers of a role; with `matching`, only those that may work with that one."""
        return [
            worker
            for worker in self._workers.values()
            if worker.record.role == role
            and (matching is None or incompatibility(worker.record, matching.record) is None)
        ]

    async def _watch_registry(self) -> None:
        registered = False
        while True:
            try:
                if registered:
                    await self._registry.heartbeat()
                else:
                    await self._registry.register(self.own)
                    registered = True
                await self._apply(await self._registry.instances())
                self._last_poll_s = time.monotonic()
            except (RedisError, OSError, TriptychError) as error:  # the workers stay: they may well be there
                log.warning("cannot read the registry", error=str(error))
            await asyncio.sleep(POLL_S)

    async def _send_heartbeats(self) -> None:
        while True:
            for worker in list(self._workers.values()):
                with contextlib.suppress(TriptychError):  # one that takes nothing leaves the registry soon
                    await worker.send(Heartbeat())
            await asyncio.sleep(HEARTBEAT_S)

    async def _apply(self, found: dict[str, InstanceRecord]) -> None:
        """Connect to what is new, drop what is gone or has been restarted."""
        alone = set(found) <= {self.own.instance_id}
        if alone and self._workers and self._forgotten_until_s == 0.0:
            # Everybody at once: more likely the broker lost its memory than all of them died. They enter
            # themselves again with their next heartbeat; believe it only after a record's lifetime.
            self._forgotten_until_s = time.monotonic() + RECORD_TTL_S
        if not alone:
            self._forgotten_until_s = 0.0
        believe = time.monotonic() >= self._forgotten_until_s
        for worker in list(self._workers.values()):
            record = found.get(worker.instance_id)
            if (record is None and believe) or (record is not None and record.epoch != worker.record.epoch):
                await self._drop(worker)
            elif record is not None:
                worker.record = record
        for record in found.values():
            if record.role != "proxy" and record.instance_id not in self._workers:
                self._consider(record)
        self._refused = {name: why for name, why in self._refused.items() if name in found}

    def _consider(self, record: InstanceRecord) -> None:
        why = self._incompatible(record)
        if why is not None:
            if self._refused.get(record.instance_id) != why:
                log.error("worker not used", worker=record.instance_id, reason=why)
            self._refused[record.instance_id] = why
            return
        self._refused.pop(record.instance_id, None)
        client = WorkerClient(self._context, record.requests_address, self.own.instance_id)
        worker = Worker(record, client)
        self._workers[record.instance_id] = worker
        self._receivers[worker] = asyncio.create_task(self._receive(worker))
        log.info("worker found", worker=record.instance_id, role=record.role, address=record.requests_address)

    def _incompatible(self, record: InstanceRecord) -> str | None:
        """Why a worker cannot be used; the proxy itself has no dtype."""
        own = self.own
        if record.protocol != own.protocol:
            return f"it speaks protocol {record.protocol}, this proxy {own.protocol}"
        if record.fingerprint != own.fingerprint:
            return f"it serves {record.model} ({record.fingerprint}), this proxy {own.model} ({own.fingerprint})"
        return None

    async def _drop(self, worker: Worker) -> None:
        log.warning("worker gone", worker=worker.instance_id, role=worker.record.role)
        worker.gone = True
        del self._workers[worker.instance_id]
        receiver = self._receivers.pop(worker)
        receiver.cancel()
        await asyncio.gather(receiver, return_exceptions=True)
        worker.client.close()
        await self._listener.on_gone(worker)

    async def _receive(self, worker: Worker) -> None:
        while True:
            await self._listener.on_message(worker, await worker.client.receive())
