"""The proxy process: the OpenAI API over HTTP in front, the cluster behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

from fastapi import FastAPI
from redis.exceptions import RedisError
from starlette.middleware.cors import CORSMiddleware

from broker.cluster.curve import ClusterContext
from broker.cluster.registry import Registry, reachable_host
from common.config import Settings
from common.errors import TriptychError
from common.http.auth import RequireKey, proxy_guard, serves_anybody
from common.http.connections import BoundedWebSocket
from common.http.server import Server, bind
from common.keys import ClusterKey, key_id
from common.messages import InstanceRecord
from common.model_info import load_model_info
from common.process import malloc, memory_upkeep
from common.process.end_signals import on_end_signal
from common.process.stack_dump import dump_on_signal
from common.telemetry import get_logger, setup_logging
from proxy.api import openapi
from proxy.dispatch.worker_pool import WorkerPool
from proxy.media.audio import AudioWindows
from proxy.media.fetch import Fetcher
from proxy.media.intake import MediaIntake
from proxy.media.videos import VideoCutter
from proxy.observe.otlp import TraceExporter
from proxy.routes import make_router
from proxy.server import errors
from proxy.server.metrics import CountRequests
from proxy.service import Service

MAX_MESSAGE_BYTES: Final = 4 * 2**20
"""Of a websocket: an event with a minute of audio."""
GRACE_S: Final = 2
"""Time for running requests after the signal to stop."""

log = get_logger()


def run(settings: Settings) -> int:
    """Serve until a signal to end. Returns 0 after a clean stop, 1 where the proxy could not start or go on."""
    malloc.use_one_arena()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # every prompt has a thread of its own
    instance_id = settings.instance_id or f"proxy-{uuid.uuid4().hex[:8]}"
    setup_logging(settings.log_level, settings.log_format, instance_id)
    dump_on_signal()
    try:
        info = load_model_info(settings.model, settings.lora_modules)
        service = Service(settings, info, instance_id)
        listener = bind(settings.host, settings.port)
    except (TriptychError, OSError) as error:
        log.error("cannot start", error=str(error))
        return 1
    with listener:
        return 0 if asyncio.run(_serve_until_signal(service, listener)) else 1


def make_app(service: Service, port: int) -> FastAPI:
    """Return the application. While running, `service` has connections and the proxy is in the registry."""
    app = FastAPI(
        title="Triptych",
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        lifespan=lambda _: connected(service, port),
    )
    app.openapi = openapi.document  # type: ignore[method-assign]
    app.include_router(make_router(service))
    app.add_middleware(RequireKey, guard=proxy_guard(service.settings), refusal=errors.refusal)
    app.add_middleware(CountRequests, metrics=service.metrics, is_draining=lambda: service.admission.draining)
    if origins := service.settings.allowed_origins:  # outermost: a preflight has no key
        methods, exposed = ("GET", "POST", "DELETE"), ("x-request-id", "retry-after")
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=methods, allow_headers="*", expose_headers=exposed
        )
    errors.install(app)
    return app


@asynccontextmanager
async def connected(service: Service, port: int) -> AsyncIterator[None]:
    """Open the connections of `service` (broker, workers, media downloads), and close them again."""
    settings = service.settings
    fetcher = Fetcher(settings)
    crashed = service.metrics.helper_crashes.inc
    make_cutter = partial(VideoCutter, service.info, settings, service.max_model_len, crashed)
    service.intake = MediaIntake(settings, fetcher, service.metrics, make_cutter)
    registry, context = Registry(service.redis, settings.cluster), ClusterContext(ClusterKey.of(settings))
    record = _own_record(service, port)
    service.pool = WorkerPool(registry, record, service.dispatcher, service.on_failure, context)
    service.admission.num_proxies = lambda: service.pool.num_proxies
    service.pool.is_draining = lambda: service.admission.draining
    service.pool.start()
    traces = TraceExporter.of_environment(service.instance_id, service.metrics.traces_lost.inc)
    if traces is not None:
        service.timelines.on_end = traces.add
        traces.start()
    if service.transcribes:
        service.recordings = AudioWindows(crashed)
    try:
        yield
    finally:
        if service.transcribes:
            service.recordings.close()
        service.intake.close()
        await service.pool.close()
        if traces is not None:
            await asyncio.to_thread(traces.close)
        fetcher.close()
        with contextlib.suppress(RedisError, OSError):
            await service.redis.aclose()


class ProxyServer(Server):
    """The proxy's HTTP server."""

    def __init__(self, app: FastAPI, service: Service) -> None:
        self._admission, metrics = service.admission, service.metrics
        super().__init__(
            app,
            service.settings,
            lambda reason: metrics.connections_ended.labels(reason).inc(),
            lifespan="on",
            timeout_graceful_shutdown=GRACE_S,
            timeout_keep_alive=30,
            ws=BoundedWebSocket,
            ws_max_size=MAX_MESSAGE_BYTES,
            ws_per_message_deflate=False,
        )
        metrics.connections.set_function(lambda: len(self.server_state.connections))

    def stop(self) -> None:
        """Refuse new requests, give running requests GRACE_S, then end."""
        self._admission.closing = True
        self.should_exit = True


async def _serve_until_signal(service: Service, listener: socket.socket) -> bool:
    """Return False where the application did not start or could not go on; the log says why."""
    port = int(listener.getsockname()[1])
    server = ProxyServer(make_app(service, port), service)
    service.on_failure = server.stop
    on_end_signal(server.stop)
    if serves_anybody(service.settings):
        log.warning("anybody who reaches this port is served: give API keys, see docs/how-to/security.md")
    memory_upkeep.begin()
    log.info("serving", model=service.model_name, host=service.settings.host, port=port)
    await server.serve(sockets=[listener])
    log.info("stopped")
    return server.started and service.pool.failure is None


def _own_record(service: Service, port: int) -> InstanceRecord:
    settings = service.settings
    host = reachable_host(settings.host, settings)
    return InstanceRecord(
        instance_id=service.instance_id,
        role="proxy",
        epoch=time.time_ns(),
        model=service.info.name,
        fingerprint=service.info.fingerprint,
        dtype="",
        http_address=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        requests_address="",
        key_id=key_id(settings),
    )
