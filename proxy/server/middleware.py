"""Counts every HTTP request by its route and status."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proxy.server.metrics import ProxyMetrics


class CountRequests:
    """Plain ASGI, so that streams and disconnects pass through it untouched."""

    def __init__(self, app: ASGIApp, metrics: ProxyMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            route = scope.get("route")  # unknown paths share one label: strangers choose them
            self._metrics.requests.labels(getattr(route, "path", "other"), status).inc()
