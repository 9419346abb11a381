"""`triptych broker`: a Redis-protocol server in the foreground, with health, readiness and metrics over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from redis.asyncio import Redis
from redis.exceptions import RedisError
from rich.console import Console
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from broker.cluster.embedded import EmbeddedBroker
from broker.cluster.redis_client import connect
from common.config import Settings
from common.errors import TriptychError
from common.http.auth import LOOPBACK_HOSTS
from common.process.end_signals import on_end_signal
from common.process.ports import reserve_port
from launch.cli.console import make_console
from launch.cluster.configure import load_settings
from services.process.http_server import HttpServer

INFO_METRICS: Final = {
    "used_memory": ("used_memory_bytes", "Memory of the broker's data, in bytes."),
    "connected_clients": ("connected_clients", "Connections of proxies and workers to the broker."),
    "total_commands_processed": ("commands_total", "Commands that the broker has run."),
    "evicted_keys": ("evicted_keys_total", "Keys that the broker has evicted for lack of memory; should stay 0."),
}
"""Fields of Redis INFO by the metric that shows them."""
_PASSWORD: Final = re.compile(r"""[^\s"'\\]*""", re.ASCII)
_POLL_S: Final = 0.2
_OPEN_PORT: Final = "warning: the broker accepts every client that reaches this port: give --password-file"


class BrokerMetrics(Collector):
    """Figures of the last INFO; only `triptych_broker_up` = 0 where the server does not answer."""

    def __init__(self) -> None:
        self.info: Mapping[str, Any] | None = None
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterable[Metric]:
        up = self.info is not None
        yield GaugeMetricFamily("triptych_broker_up", "1 while the broker's server answers, else 0.", value=int(up))
        for field, (name, meaning) in INFO_METRICS.items():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            value = None if self.info is None else float(self.info[field])
            yield kind(f"triptych_broker_{name}", meaning, value=value)


def run_broker(host: str, port: int, http_port: int, password: str) -> int:
    """Run the server until SIGINT or SIGTERM, then return 0.

    Raises TriptychError where a port is taken, no server program is found, or the server ends by itself.
    """
    if _PASSWORD.fullmatch(password) is None:
        message = "the broker's password may hold no spaces, quotes or backslashes; make one: openssl rand -hex 32"
        raise TriptychError("invalid_request", message, "password")
    settings = load_settings({}).model_copy(update={"port": reserve_port(host, http_port, "--http-port")})
    server = EmbeddedBroker(host, reserve_port(host, port, "--port"), password)
    try:
        url, console = server.start(), make_console()
        shown = f"[{host}]" if ":" in host else host
        console.print(f"broker at redis://{shown}:{server.port}, pid {server.pid}", highlight=False)
        console.print(f"health at http://{shown}:{settings.port}/health · Ctrl-C stops both", highlight=False)
        if not password and host not in LOOPBACK_HOSTS:
            console.print(_OPEN_PORT, style="yellow", highlight=False, soft_wrap=True)
        asyncio.run(_serve(server, connect(url, retries=0), host, settings, console))
    finally:
        server.stop()
    return 0


async def _serve(server: EmbeddedBroker, redis: Redis, host: str, settings: Settings, console: Console) -> None:
    http, stop = HttpServer(make_app(redis), host, settings), asyncio.Event()
    on_end_signal(stop.set)
    serving = asyncio.create_task(http.run())
    while server.running and not stop.is_set() and not serving.done():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _POLL_S)
    http.stop()
    await serving
    http.close()
    await redis.aclose()
    if not stop.is_set():
        raise TriptychError("unavailable", f"the broker's server has ended by itself:\n{server.log_tail()}")
    console.print("stopped", style="dim")


def make_app(redis: Redis) -> Starlette:
    """Return GET /health (this process runs), /ready (the server answers PING) and /metrics (figures of INFO)."""
    metrics = BrokerMetrics()

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(request: Request) -> Response:
        try:
            await redis.ping()
        except RedisError as error:
            return JSONResponse({"status": "unavailable", "reason": str(error)}, status_code=503)
        return await health(request)

    async def show_metrics(_: Request) -> Response:
        try:
            metrics.info = await redis.info()
        except RedisError:
            metrics.info = None
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return Starlette(routes=[Route("/health", health), Route("/ready", ready), Route("/metrics", show_metrics)])
