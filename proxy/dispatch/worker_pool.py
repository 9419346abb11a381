"""Connections of this proxy to workers: found in the registry, one connection each, closed with the registry entry."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol

import zmq
import zmq.asyncio
from redis.exceptions import RedisError, ResponseError

from broker.cluster.redis_client import REFUSALS, refused
from broker.cluster.registry import HEARTBEAT_S, RECORD_TTL_S, Registry, incompatibility
from broker.cluster.rpc import WorkerClient, connection_id, life_id
from common.errors import TriptychError
from common.messages import Abort, FromWorker, Heartbeat, InstanceRecord, Placed, Role
from common.telemetry import get_logger
from proxy.dispatch.worker import Worker, WorkerEvent

POLL_S: Final = 0.5
"""How often to look at the registry where it says nothing: of the dead, and where the broker was away."""
ABSENCE_S: Final = 2.0
"""Absence from the registry after which a worker is gone."""
BURST_S: Final = 0.02
"""Time for the waiting messages of a worker before the jobs have a turn, and find several tokens."""
TOGETHER_S: Final = 0.25
"""Wait of a connected worker for others with a connection under way."""
LAST_WORDS_MS: Final = 200
"""Time for the last aborts to a removed worker."""

log = get_logger()


class Listener(Protocol):
    """Receives worker messages and the arrival and loss of workers."""

    def on_message(self, worker: Worker, message: FromWorker) -> None: ...

    def requests_at(self, worker: Worker) -> list[str]:
        """Return the requests under way on a worker."""

    def on_invalid(self) -> None:
        """Note a dropped message outside the protocol."""

    def on_event(self, worker: Worker, event: WorkerEvent) -> None: ...

    def on_placed(self, placed: Placed) -> None:
        """Note where another proxy placed a prompt."""


class WorkerPool:
    """Keeps one connection per live, compatible worker, and this proxy's own entry in the registry.

    `own` is the proxy's record; workers whose model fingerprint or protocol differ from it are not used.
    `on_failure` is called when the pool cannot go on; `failure` then says why.
    """

    def __init__(
        self,
        registry: Registry,
        own: InstanceRecord,
        listener: Listener,
        on_failure: Callable[[], None],
        context: zmq.asyncio.Context,
    ) -> None:
        """Own `context`, and end it on `close`."""
        self.own = own
        self.is_draining: Callable[[], bool] = lambda: False
        self._on_failure = on_failure
        # New at every start and for every connection: with an old identity, workers would keep the requests of the
        # earlier connection.
        self._identities = (connection_id(own.instance_id, own.epoch, number) for number in itertools.count())
        self._registry = registry
        self._changed = asyncio.Event()  # the registry tells of a change
        self._last_look_s = -math.inf
        self._listener = listener
        self._context = context
        self._workers: dict[str, Worker] = {}
        self._listeners: dict[Worker, list[asyncio.Task[None]]] = {}
        self._lost: dict[str, float] = {}  # lives with a broken connection: dead until then
        self._tasks: set[asyncio.Task[None]] = set()
        self.seen: dict[str, InstanceRecord] = {}
        """All instances of the registry by id, proxies included, as of the last look."""
        self.num_proxies = 1
        """Proxies of the cluster as of the last look, this one included."""
        self.refused: dict[str, str] = {}
        """Workers that are not used, and why."""
        self._newest: dict[str, int] = {}  # the last epoch of each instance in the registry
        self._last_usable_s: dict[Role, float] = {}
        self._usable: dict[tuple[tuple[Role, ...], str | None], list[Worker]] = {}
        """Results of `workers` since a worker has last come, changed or gone."""
        self._unknown_since_s = time.monotonic()
        """Start of the time without knowledge of the registry; minus infinity after the first look."""
        self.failure: str | None = None
        """The reason why this pool has stopped working; None while working."""

    def start(self) -> None:
        """Begin to look for workers, and go on until `close`. The broker need not be there yet."""
        self._background(self._look())
        self._background(self._listen())
        self._background(self._send_heartbeats())

    async def close(self) -> None:
        """Stop, close every connection and leave the registry."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for worker in self._workers.values():
            worker.gone = True
            worker.client.close()
        self._workers.clear()
        self._listeners.clear()
        self._context.term()
        with contextlib.suppress(RedisError, TriptychError, TimeoutError):
            async with asyncio.timeout(1.0):  # without a broker the entry expires by itself
                await self._registry.unregister()

    @property
    def broker_reachable(self) -> bool:
        return time.monotonic() - self._last_look_s < 2 * HEARTBEAT_S + POLL_S

    @property
    def has_looked(self) -> bool:
        """Whether this pool has read the registry; before, all workers are unknown."""
        return self._unknown_since_s == -math.inf

    def workers(self, *roles: Role, matching: Worker | None = None) -> list[Worker]:
        """Return live workers of these roles for new work; with `matching`, only workers compatible with that worker.

        Left out are draining workers and workers without an admitted connection. Workers that have just left the
        registry may be stopping: they count only in the absence of others.
        """
        dtype = None if matching is None else matching.record.dtype  # they all fit this proxy, and differ in this alone
        if (roles, dtype) not in self._usable:
            found = [
                worker
                for worker in self._workers.values()
                if worker.record.role in roles
                and worker.admitted
                and not worker.record.draining
                and dtype in (None, worker.record.dtype)
            ]
            self._usable[roles, dtype] = [worker for worker in found if worker.missing_since_s is None] or found
        return self._usable[roles, dtype]

    def tell(self, placed: Placed) -> None:
        """Tell the other proxies where a prompt was placed, unless the broker is away."""
        if self.broker_reachable:
            self._background(self._registry.tell(placed))

    def find(self, instance_id: str) -> Worker | None:
        """Return a worker with a connection, in use or not; None for an unknown or lost one."""
        return self._workers.get(instance_id)

    def absent_s(self, *roles: Role, matching: Worker | None = None) -> float:
        """Return for how long these roles had no usable worker; infinity if never, or where present workers do not
        match. A pool before its first look never returns infinity."""
        if self.workers(*roles, matching=matching):
            return 0.0
        if self.workers(*roles):
            return math.inf
        return time.monotonic() - max(self._last_usable_s.get(role, self._unknown_since_s) for role in roles)

    async def _look(self) -> None:
        """Keep the own entry, and look at all others every POLL_S, or at once after a change.

        Raises TriptychError("unavailable") where another process has taken this one's instance id, and where the broker
        has never let us in.
        """
        registered = False
        while True:
            began_s = time.monotonic()
            self._changed.clear()
            try:
                if registered:
                    await self._registry.heartbeat(draining=self.is_draining())
                else:
                    await self._registry.register(self.own)
                    registered = True
                self._apply(await self._registry.instances())
                self._last_look_s = time.monotonic()
            except (RedisError, OSError) as error:  # the workers stay: they may well be there
                if isinstance(error, REFUSALS) and not registered:
                    raise refused(error) from error
                log.warning("cannot read the registry", error=str(error))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await asyncio.sleep(time.monotonic() - began_s)  # at most half of the time goes into looks
                    await self._changed.wait()

    async def _listen(self) -> None:
        """Have `_look` look at once when a worker comes, drains or leaves, and hand on what other proxies tell, as far
        as the broker lets us listen."""
        while True:
            try:
                async with contextlib.aclosing(self._registry.changes()) as changes:
                    async for placed in changes:
                        if placed is None:
                            self._changed.set()
                        elif placed.proxy != self.own.instance_id:
                            self._listener.on_placed(placed)
            except ResponseError as error:
                why = str(error)
                log.warning("the broker does not let us listen: new workers are used half a second later", error=why)
                return
            except (RedisError, OSError):  # `_look` has told it
                await asyncio.sleep(POLL_S)

    async def _send_heartbeats(self) -> None:
        while True:
            for worker in list(self._workers.values()):
                worker.notify(Heartbeat())
                await asyncio.sleep(0)  # a thousand take 25 ms
            await asyncio.sleep(HEARTBEAT_S)

    def _apply(self, found: dict[str, InstanceRecord]) -> None:
        """Connect to new workers; remove workers that are gone or restarted."""
        self.seen = found
        self._usable.clear()
        for worker in list(self._workers.values()):
            record = found.get(worker.instance_id)
            if record is None:
                self._note_missing(worker)
            elif record.epoch != worker.record.epoch:
                self._remove(worker)
            else:
                self._note_usable(worker)
                worker.record, worker.missing_since_s = record, None
        now_s = time.monotonic()
        self._lost = {life: until_s for life, until_s in self._lost.items() if until_s > now_s}
        for record in found.values():
            known = record.instance_id in self._workers or life_id(record.instance_id, record.epoch) in self._lost
            if record.role != "proxy" and not known:
                self._consider(record)
        self.num_proxies = len({self.own.instance_id, *(name for name, one in found.items() if one.role == "proxy")})
        self._unknown_since_s = -math.inf
        self._usable.clear()
        self.refused = {name: why for name, why in self.refused.items() if name in found}
        self._newest = {name: epoch for name, epoch in self._newest.items() if name in found}

    def _note_usable(self, worker: Worker) -> None:
        if worker.admitted and not worker.record.draining:
            self._last_usable_s[worker.record.role] = time.monotonic()

    def _note_missing(self, worker: Worker) -> None:
        """Believe an absence only after ABSENCE_S: workers register again after a broker lost its memory."""
        now_s = time.monotonic()
        if worker.missing_since_s is None:
            worker.missing_since_s = now_s
        elif now_s - worker.missing_since_s > ABSENCE_S:
            self._remove(worker)

    def _consider(self, record: InstanceRecord) -> None:
        why = incompatibility(record, self.own)
        if why is not None:
            if self.refused.get(record.instance_id) != why:
                log.error("worker not used", worker=record.instance_id, reason=why)
            self.refused[record.instance_id] = why
            return
        self.refused.pop(record.instance_id, None)
        life = life_id(record.instance_id, record.epoch)
        client = WorkerClient(
            self._context, record.requests_address, next(self._identities), self._listener.on_invalid, life
        )
        worker = Worker(record, client)
        self._workers[record.instance_id] = worker
        self._listeners[worker] = [
            self._background(self._receive(worker)),
            self._background(self._watch_connection(worker)),
        ]
        # A new life will be usable in a moment. A life with a broken connection may never be.
        if record.epoch > self._newest.get(record.instance_id, 0) and not record.draining:
            self._newest[record.instance_id] = record.epoch
            self._last_usable_s[record.role] = time.monotonic()
        log.info("worker found", worker=record.instance_id, role=record.role, address=record.requests_address)

    def _remove(self, worker: Worker) -> None:
        if worker.gone:
            return
        log.warning("worker gone", worker=worker.instance_id, role=worker.record.role)
        for request_id in self._listener.requests_at(worker):  # alive, perhaps, and lost by the registry alone
            worker.notify(Abort(request_id))
        self._note_usable(worker)
        worker.gone = True
        del self._workers[worker.instance_id]
        self._usable.clear()
        for task in self._listeners.pop(worker):
            if task is not asyncio.current_task():
                task.cancel()
        worker.client.close(LAST_WORDS_MS)
        self._listener.on_event(worker, "gone")

    async def _receive(self, worker: Worker) -> None:
        """Hand on the worker's messages, until another process turns out to have the address."""
        while True:
            until_s = time.monotonic() + BURST_S
            while time.monotonic() < until_s:
                try:
                    message = await worker.client.receive()
                except TriptychError as error:
                    log.warning("worker not there", worker=worker.instance_id, error=error.info.message)
                    return self._lose(worker)
                self._listener.on_message(worker, message)
            await asyncio.sleep(0)

    async def _watch_connection(self, worker: Worker) -> None:
        """Admit a worker once connected, and remove the worker when the connection is lost or refused."""
        if await worker.client.opened():
            self._background(self._admit())
            await worker.client.lost()
        self._lose(worker)

    def _lose(self, worker: Worker) -> None:
        self._lost[worker.client.life] = time.monotonic() + RECORD_TTL_S + POLL_S
        self._remove(worker)

    async def _admit(self) -> None:
        """Admit connected workers, together with workers found at the same time: otherwise all requests that wait for a
        restarted proxy would go to the first worker."""
        if not all(worker.client.connected for worker in self._workers.values()):
            await asyncio.sleep(TOGETHER_S)
        admitted = [one for one in self._workers.values() if one.client.connected and not one.admitted]
        for worker in admitted:
            worker.admitted = True
        self._usable.clear()
        for worker in admitted:
            self._listener.on_event(worker, "joined")

    def _background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Make a bug in a background task visible: without it the proxy would only look alive."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        self.failure = error.info.message if isinstance(error, TriptychError) else repr(error)
        self._on_failure()
        if isinstance(error, TriptychError):
            log.error("this proxy cannot go on", error=self.failure)
        else:
            log.error("background task failed", exc_info=error)
