"""The process around an engine: sockets, heartbeat, loading, drain and shutdown, common to all roles.

    HTTP (health, metrics, drain)        requests (ZMQ)      channels (Redis)      heartbeat
              \\                               |                   |                  /
               +------------------ one asyncio loop: the role ----------------------+
                                    |  commands       ^  events
                                    v                 |
                                       engine thread(s)

Any part that ends on its own ends the process: a worker is whole or gone, and others notice a lost worker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

from redis.exceptions import RedisError

from broker.cluster.curve import ClusterContext
from broker.cluster.redis_client import connect, wait_until_reachable
from broker.cluster.registry import HEARTBEAT_S, Registry
from broker.cluster.rpc import WorkerServer, life_id
from broker.handoff.channels import ChannelReader, ChannelSender
from common.config import Settings
from common.errors import ErrorInfo, TriptychError
from common.http.auth import worker_guard
from common.keys import ClusterKey
from common.messages import Abort, Failed, Heartbeat, Inquiry, Role
from common.model_info import ModelInfo
from common.process.end_signals import on_end_signal
from common.telemetry import get_logger
from services.handoff.payloads import open_cuda
from services.membership import Membership, make_record
from services.process.addresses import resolve_host, warn_of_few_descriptors, warn_of_open_host
from services.process.drain import DrainMarker, DrainState
from services.process.engine_thread import EngineThread
from services.process.handoff_trace import HandoffTrace
from services.process.http_server import HttpServer, make_app, protect
from services.process.metrics import WorkerMetrics
from services.process.request_owners import RequestOwners
from services.process.watchdog import Watchdog
from services.process.work import WorkMeter
from services.roles.factory import check_role
from services.worker_context import RoleService, WorkerContext

BROKER_WAIT_S: Final = 30.0
BEAT_S: Final = 10 * HEARTBEAT_S
"""Limit of all broker calls of a heartbeat; the next heartbeat tries again."""
STATS_WAIT_S: Final = 1.0
JOIN_S: Final = 1.0

log = get_logger()


class WorkerProcess:
    """One worker process, from its first socket to its last."""

    def __init__(
        self,
        settings: Settings,
        info: ModelInfo,
        dtype: str,
        role: Callable[[WorkerContext], RoleService],
        on_loaded: Callable[[], None] = lambda: None,
    ) -> None:
        """Bind the sockets and make the role, on the loop. Raises TriptychError or OSError.

        `on_loaded` is called once the process is complete, before it enters the registry.
        """
        if settings.broker is None:
            raise TriptychError("invalid_request", "a worker needs a broker: give --broker redis://host:port", "broker")
        self._info = info
        self._on_loaded = on_loaded
        host = resolve_host(settings.host)
        metrics = WorkerMetrics()
        hops = HandoffTrace(metrics.hop_seconds)
        app = make_app(
            health=self.health,
            ready=self.ready,
            metrics=self._render_metrics,
            handoffs=hops.as_json,
            drain=self.drain,
            switch=self.switch,
        )
        protect(app, worker_guard(settings))
        self._http = HttpServer(app, host, settings)  # first: a taken port leaves nothing open
        self._redis, self._reading = connect(settings.broker), connect(settings.broker, retries=0)
        registry = Registry(self._redis, settings.cluster)
        key = ClusterKey.of(settings)
        warn_of_open_host(host, has_key=key is not None)
        warn_of_few_descriptors(host)
        self._zmq_context = ClusterContext(key)
        self._proxies = RequestOwners()
        self._drain = DrainState(lambda: len(self._proxies), settings.request_timeout_s)
        self._marker = DrainMarker.of_environment()
        self._membership = Membership(registry, self._proxies, self._drain, metrics.figures)
        self.next_role: Role | None = None
        self.abandons_engine = False
        """Whether an engine is still in a step once `run` has returned: the process must end regardless."""
        self.stop = asyncio.Event()
        """Set by a signal or by the caller of `run`, to end the worker."""
        self.instance_id = instance_id = settings.instance_id or "worker"
        epoch = time.time_ns()
        self._server = WorkerServer(self._zmq_context, host, life_id(instance_id, epoch))
        self._context = WorkerContext(
            settings=settings,
            info=info,
            instance_id=instance_id,
            epoch=epoch,
            host=host,
            dtype=dtype,
            zmq_context=self._zmq_context,
            redis=self._redis,
            registry=registry,
            channels=ChannelSender(self._redis, settings.cluster),
            server=self._server,
            proxies=self._proxies,
            metrics=metrics,
            hops=hops,
            cuda=open_cuda(settings.engine.device),
        )
        self._role = role(self._context)
        self._watchdog = Watchdog(self._role.threads, settings.step_timeout_s)
        self._reader = ChannelReader(self._reading, settings.cluster, instance_id, self._role.channels)
        self._work = WorkMeter()
        self._add_metrics()

    async def run(self) -> int:
        """Serve until a signal to end or a drain (0), or until a part breaks (1).

        `next_role` is set for a process that shall start anew in another role.
        """
        on_end_signal(self.stop.set)
        serving = asyncio.create_task(self._serve())
        ends = asyncio.create_task(self.stop.wait()), asyncio.create_task(self._drain.complete())
        tasks: tuple[asyncio.Task[Any], ...] = (serving, *ends)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        failed = serving.done()
        self.next_role = None if failed or self.stop.is_set() else self._drain.next_role
        for task in tasks:
            task.cancel()
        (error, *_) = await asyncio.gather(*tasks, return_exceptions=True)
        if failed:
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            known = isinstance(error, TriptychError)
            message = error.info.message if isinstance(error, TriptychError) else repr(error)
            log.error("this worker cannot go on", error=message, exc_info=None if known else error)
        await self._close()
        log.info("stopped", failed=failed)
        return 1 if failed else 0

    def health(self) -> str | None:
        """Return why this process should be restarted; None for a healthy process."""
        dead = any(thread.ended.done() for thread in self._role.threads)
        return "the engine thread is dead" if dead else self._watchdog.look()

    def ready(self) -> str | None:
        """Return why no request should be sent here; None when ready."""
        if not all(thread.loaded.done() for thread in self._role.threads):
            return "the model is being loaded"
        return self._membership.problem() or self.health()

    def is_idle(self) -> bool:
        """Whether no request is under way."""
        return not len(self._proxies)

    async def drain(self, wait_s: float = 0.0) -> int:
        """Refuse new requests, finish requests under way, then end with status 0. Returns the number under way, at once
        or when the worker may go, after `wait_s` seconds at the latest.

        Raises TriptychError for a worker that is switching its role.
        """
        left = await self._begin_drain(None)
        return await self._drain.wait(wait_s) if wait_s > 0 else left

    async def switch(self, role: str) -> int:
        """Drain, and end with `next_role` set. Raises TriptychError for an impossible role."""
        if role == self._role.role:
            raise TriptychError("invalid_request", f"{self._context.instance_id} has the role {role} already", "role")
        return await self._begin_drain(check_role(role, self._info))

    async def _begin_drain(self, next_role: Role | None) -> int:
        self._drain.request(next_role)
        self._marker.write(next_role)
        log.info("draining", next_role=next_role, outstanding=len(self._proxies))
        await self._membership.announce()
        return len(self._proxies)

    async def _serve(self) -> None:
        role = self._role
        async with asyncio.TaskGroup() as group:
            group.create_task(self._http.run())
            loading = group.create_task(self._load(group))
            await wait_until_reachable(self._redis, BROKER_WAIT_S)
            await loading
            record = make_record(self._context, role, self._http.port, self._drain)
            group.create_task(self._watchdog.watch())
            await role.start(record)
            await wait_until_reachable(self._reading, BROKER_WAIT_S, self._reader.open)  # loading may take minutes
            for coroutine in (self._context.channels.run(), self._reader.run(role.handle_delivery), *role.tasks()):
                group.create_task(coroutine)
            group.create_task(self._receive_requests())
            group.create_task(self._watch_proxies())
            self._on_loaded()
            await wait_until_reachable(self._redis, BROKER_WAIT_S, lambda: self._membership.join(record))
            if not self._drain.requested:
                self._marker.remove()  # left by the switch to this role
            log.info("ready", role=role.role, http=record.http_address, requests=record.requests_address)
            group.create_task(self._beat())
            group.create_task(self._observe())

    async def _load(self, group: asyncio.TaskGroup) -> None:
        """Start the engines one after the other: the pools of each take memory that earlier engines left."""
        for thread in self._role.threads:
            group.create_task(self._watch_engine(thread))
            thread.start()
            await thread.loaded

    async def _watch_engine(self, thread: EngineThread[Any, Any]) -> None:
        error = await asyncio.shield(thread.ended)
        raise error or TriptychError("internal_error", "the engine thread has stopped")

    async def _receive_requests(self) -> None:
        while True:
            proxy, message = await self._server.receive()
            if lost := self._proxies.heard(proxy):
                error = ErrorInfo("unavailable", f"{self._context.instance_id} had lost its connection to the proxy")
                if "gone" in self._context.send(proxy, *(Failed(name, error, lost[name]) for name in lost)):
                    self._proxies.lose(proxy, lost)  # the queue to the proxy may still be full
            if isinstance(message, Abort):
                known = self._proxies.get(message.request_id) is not None
                if not known or self._proxies.owns(proxy, message.request_id):
                    self._role.abort(message.request_id)
            elif isinstance(message, Inquiry):
                self._answer(proxy, message)
            elif not isinstance(message, Heartbeat):
                self._role.handle_request(proxy, message)

    def _answer(self, proxy: bytes, inquiry: Inquiry) -> None:
        """Report a lost attempt. A recently ended one is not lost: its last message may still be under way."""
        if self._proxies.knows(inquiry.request_id, inquiry.attempt):
            return
        self._proxies.num_unknown += 1
        log.warning("asked for a request that is not here", request=inquiry.request_id, attempt=inquiry.attempt)
        error = ErrorInfo("unavailable", f"{self._context.instance_id} has lost the request")
        self._context.send(proxy, Failed(inquiry.request_id, error, inquiry.attempt))

    async def _watch_proxies(self) -> None:
        """Once a second, send a heartbeat to all proxies and discard requests of silent or lost proxies."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            worked_s = sum(thread.worked_s for thread in self._role.threads)
            self._work.look(worked_s, self._proxies.ended_work, idle=not len(self._proxies))
            for proxy in self._proxies.present:
                self._context.send(proxy, Heartbeat())
            for request_id in self._proxies.pop_orphans():
                self._role.abort(request_id)

    async def _beat(self) -> None:
        """Once a second, renew the registry entry and let the role review the instances that it sends to."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                async with asyncio.timeout(BEAT_S):
                    await self._membership.beat()
                    await self._role.review()
                    await self._reader.keep_alive()
            except (RedisError, TimeoutError) as error:
                log.warning("no heartbeat", error=str(error) or f"the broker has not answered within {BEAT_S:g} s")

    async def _observe(self) -> None:
        """Once a second, get the engines' numbers for the next heartbeat, which waits for no engine."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await self._look_at_engines()

    def _add_metrics(self) -> None:
        metrics, role, channels = self._context.metrics, self._role, self._context.channels
        metrics.gauges["requests_outstanding"] = lambda: len(self._proxies)
        metrics.gauges["requests_outstanding_tokens"] = lambda: self._proxies.num_tokens
        metrics.gauges["outstanding_work_seconds"] = lambda: self._work.seconds_of(self._proxies.work)
        metrics.gauges["requests_orphaned_total"] = lambda: self._proxies.num_orphans
        metrics.gauges["requests_unknown_total"] = lambda: self._proxies.num_unknown
        metrics.gauges["first_request_delay_seconds"] = lambda: self._membership.first_request_delay_s
        metrics.gauges["draining"] = lambda: self._drain.requested
        metrics.gauges["engine_busy_seconds"] = lambda: max(thread.busy_s for thread in role.threads)
        metrics.gauges["channel_messages_waiting"] = lambda: channels.num_waiting
        metrics.tallies["dropped_messages"] = lambda: {
            "invalid_request": self._server.num_invalid,
            "invalid_channel": self._reader.num_invalid,
            "undeliverable": channels.num_dropped,
            "trimmed": channels.num_trimmed,
        }

    async def _render_metrics(self) -> bytes:
        """Render present numbers if the engine answers soon, else the last numbers."""
        for thread in await self._look_at_engines():
            log.warning("metrics are old: the engine is busy", busy_s=thread.busy_s)
        return self._context.metrics.render()

    async def _look_at_engines(self) -> list[EngineThread[Any, Any]]:
        """Keep the present numbers of each engine; return the engines too busy to tell within STATS_WAIT_S."""
        busy = []
        for thread in self._role.threads:
            try:
                stats = await thread.call(lambda engine: engine.stats(), STATS_WAIT_S)
                self._context.metrics.engine_stats[thread] = stats
            except TimeoutError:
                busy.append(thread)
        return busy

    async def _close(self) -> None:
        """Leave the cluster, then free all resources. Takes about two seconds at worst."""
        try:
            async with asyncio.timeout(JOIN_S):
                if await self._membership.exit():
                    await self._reader.delete()
        except (TimeoutError, RedisError) as error:
            log.warning("could not sign off at the broker: the entries there expire", error=repr(error))
        self._role.close()
        for thread in self._role.threads:
            thread.stop()
        for thread in self._role.threads:
            if not await asyncio.to_thread(thread.join, JOIN_S):
                self.abandons_engine = True
                log.warning("the engine is still in a step; the process ends without it")
        self._server.close()
        self._http.close()
        self._zmq_context.destroy(linger=0)
        await self._redis.aclose()
        await self._reading.aclose()
