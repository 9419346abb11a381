"""The small HTTP side of a worker: is it alive, is it ready, what does it count. Served in the worker's own loop."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from common.errors import TriptychError

Check = Callable[[], str | None]
"""Why not; None if all is well."""


def make_app(
    *,
    health: Check,
    ready: Check,
    metrics: Callable[[], Awaitable[bytes]],
    handoffs: Callable[[], list[dict[str, Any]]],
) -> FastAPI:
    """GET /health and /ready (200, or 503 with a reason), /metrics, and /debug/handoffs (see services.hops)."""
    app = FastAPI(title="Triptych worker", docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/health")
    async def _health() -> Response:
        return _verdict(health())

    @app.get("/ready")
    async def _ready() -> Response:
        return _verdict(ready())

    @app.get("/metrics")
    async def _metrics() -> Response:
        return Response(await metrics(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/debug/handoffs")
    async def _handoffs() -> Response:
        return JSONResponse(handoffs())

    return app


class HttpServer:
    """uvicorn in the running loop, without its signal handlers: the shell has its own."""

    def __init__(self, app: FastAPI, host: str, port: int) -> None:
        """Bind now, so that the port is known; 0 picks a free one.

        Raises TriptychError("invalid_request") where the port cannot be had.
        """
        try:
            self._socket = socket.create_server((host, port), backlog=128)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            message = f"cannot listen on {host}:{port}: {error.strerror}; give another --port, or 0 for a free one"
            raise TriptychError("invalid_request", message, "port") from error
        self.port = int(self._socket.getsockname()[1])
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1, ws="none"
        )
        self._server = _QuietServer(config)

    async def run(self) -> None:
        """Serve until `stop`."""
        await self._server.serve(sockets=[self._socket])

    def stop(self) -> None:
        self._server.should_exit = True

    def close(self) -> None:
        self._socket.close()


class _QuietServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _verdict(problem: str | None) -> Response:
    if problem is None:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "unavailable", "reason": problem}, status_code=503)
