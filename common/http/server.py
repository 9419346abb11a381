"""What the HTTP servers of all processes have in common: how they listen, and how they treat connections."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any, Final

import uvicorn

from common.config import Settings
from common.errors import TriptychError
from common.http.connections import BoundedConfig, Connections, Reason, allowed_connections

UNREAD_MS: Final = 60_000
"""A client that takes nothing for so long is gone: the system closes its connection."""
SEND_BUFFER_BYTES: Final = 256 * 2**10
"""Of a connection (Linux takes twice as much). Left to itself it grows to 4 MiB, which are 16,000 tokens of a stream
that nobody reads."""


class Server(uvicorn.Server):
    """uvicorn in the running loop with bounded connections, and without its own signal handlers, which would end the
    process by the signal after a clean stop."""

    def __init__(
        self, app: Any, settings: Settings, on_ended: Callable[[Reason], None] = lambda _: None, **options: Any
    ) -> None:
        """`on_ended` is told why a connection was ended from here; `options` are uvicorn's."""
        limit = allowed_connections(settings.max_connections)
        connections = Connections(limit, settings.client_timeout_s, on_ended)
        fixed = {"log_config": None, "access_log": False, "ws": "none", "server_header": False}
        super().__init__(BoundedConfig(app, connections, **fixed, **options))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 picks a free one. Raises TriptychError("invalid_request") where it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        message = f"cannot listen on {host}:{port}: {error.strerror or error}; give another --port, or 0 for a free one"
        raise TriptychError("invalid_request", message, "port") from error
    # asyncio does so only where the protocol is explicit; without it a stream waits 40 ms for a delayed ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # elsewhere such a connection lives until the request's deadline
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS)
    return listener
