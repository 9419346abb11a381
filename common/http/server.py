"""HTTP server of every process: listening sockets, and uvicorn with bounded connections."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import uvicorn

from common.config import Settings
from common.errors import invalid
from common.http.connections import BoundedProtocol, Connections, Reason, allowed_connections

UNREAD_MS: Final = 60_000
"""The system closes the connection of a client that has acknowledged no data for this long."""
SEND_BUFFER_BYTES: Final = 256 * 2**10
"""Per connection (Linux doubles the value). By default the buffer grows to 4 MiB: 16,000 tokens of an unread stream."""


class Server(uvicorn.Server):
    """uvicorn in the running loop, with bounded connections.

    uvicorn's signal handlers are off: after a clean stop they would end the process by the signal.
    """

    def __init__(
        self, app: Any, settings: Settings, on_ended: Callable[[Reason], None] = lambda _: None, **options: Any
    ) -> None:
        """`on_ended` receives the reason when the server ends a connection; `options` are uvicorn's."""
        limit = allowed_connections(settings.max_connections)
        http: Any = partial(BoundedProtocol, Connections(limit, settings.client_timeout_s, on_ended))
        fixed: dict[str, Any] = {"log_config": None, "access_log": False, "ws": "none", "server_header": False}
        super().__init__(uvicorn.Config(app, http=http, **(fixed | options)))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 picks a free port. Raises TriptychError("invalid_request") for a taken port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        message = f"cannot listen on {host}:{port}: {error.strerror or error}; give another --port, or 0 for a free one"
        raise invalid(message, "port") from error
    # asyncio sets this only for sockets with an explicit protocol. Without it a stream waits 40 ms for a delayed ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # other systems keep the connection until the request's deadline
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS)
    return listener
