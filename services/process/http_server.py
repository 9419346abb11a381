"""HTTP of a worker: health, readiness, metrics, drain. Served in the worker's own loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from common.config import Settings
from common.errors import TriptychError, invalid
from common.http.auth import Guard, RequireKey
from common.http.drain import drain_answer, wait_of
from common.http.server import Server, bind

Check = Callable[[], str | None]
"""The problem; None if all is well."""


def make_app(
    *,
    health: Check,
    ready: Check,
    metrics: Callable[[], Awaitable[bytes]],
    handoffs: Callable[[], list[dict[str, Any]]],
    drain: Callable[[float], Awaitable[int]],
    switch: Callable[[str], Awaitable[int]],
) -> Starlette:
    """Make the application of a worker.

    GET /health, /ready        200, or 503 with a reason
    GET /metrics               Prometheus' text format
    GET /debug/handoffs        see services.process.handoff_trace
    POST /drain[?wait=S]       202, the worker ends once idle; 400 with an error if refused; after at most S seconds,
                               and 200 if the worker has nothing under way then
    POST /switch {"role": R}   202, the worker becomes an R once idle; 400 with an error if impossible
    """

    async def show_health(_: Request) -> Response:
        return _verdict(health())

    async def show_ready(_: Request) -> Response:
        return _verdict(ready())

    async def show_metrics(_: Request) -> Response:
        return Response(await metrics(), media_type=CONTENT_TYPE_LATEST)

    async def show_handoffs(_: Request) -> Response:
        return JSONResponse(handoffs())

    async def begin_drain(request: Request) -> Response:
        wait_s = wait_of(request.query_params.get("wait"))
        return drain_answer(await drain(wait_s), waited=wait_s > 0)

    async def begin_switch(request: Request) -> Response:
        try:
            role = msgspec.json.decode(await request.body(), type=_SwitchRequest).role
        except msgspec.MsgspecError as error:
            raise invalid(f'the body must be {{"role": "ROLE"}}: {error}', "role") from error
        return drain_answer(await switch(role), waited=False)

    return Starlette(
        routes=[
            Route("/health", show_health),
            Route("/ready", show_ready),
            Route("/metrics", show_metrics),
            Route("/debug/handoffs", show_handoffs),
            Route("/drain", begin_drain, methods=["POST"]),
            Route("/switch", begin_switch, methods=["POST"]),
        ],
        exception_handlers={TriptychError: _refuse},
    )


class _SwitchRequest(msgspec.Struct, forbid_unknown_fields=True):
    role: str


def protect(app: Starlette, guard: Guard) -> None:
    """Answer 401 unless `guard` allows a request."""
    message = "this endpoint wants a key: send `Authorization: Bearer KEY`, see docs/how-to/security.md"
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": "invalid_api_key"}
    refusal = JSONResponse({"error": error}, 401, {"WWW-Authenticate": "Bearer"})
    app.add_middleware(RequireKey, guard=guard, refusal=refusal)


class HttpServer:
    """The HTTP server of a worker, on a port known before serving."""

    def __init__(self, app: Starlette, host: str, settings: Settings) -> None:
        """Bind now; port 0 picks a free port. Raises TriptychError("invalid_request") for a taken port."""
        self._socket = bind(host, settings.port)
        self.port = int(self._socket.getsockname()[1])
        self._server = Server(app, settings, lifespan="off", timeout_graceful_shutdown=1)

    async def run(self) -> None:
        """Serve until `stop`."""
        await self._server.serve(sockets=[self._socket])

    def stop(self) -> None:
        self._server.should_exit = True

    def close(self) -> None:
        self._socket.close()


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, TriptychError)
    return JSONResponse({"error": msgspec.to_builtins(error.info)}, status_code=error.info.http_status)


def _verdict(problem: str | None) -> Response:
    if problem is None:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "unavailable", "reason": problem}, status_code=503)
