"""Access to HTTP paths by key. Plain ASGI: streams and disconnects pass through untouched.

path                      with keys configured          without
/health, /ready, /ping    open                          open
/metrics, /metrics/…      a key; open with `metrics_without_key`    open
/, /page/NAME             open: files without anything of the cluster   open
/drain, /switch           the cluster's token           this machine
all others                a key                         open

"A key" means an API key; a worker accepts the cluster's token as well. "Without" means: no API key for the proxy,
neither API key nor cluster key for a worker. A key that comes into the file, or leaves it, counts from the next call.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from common.config import Settings
from common.errors import TriptychError
from common.keys import TokenSet, api_keys, bearer, cluster_token, may_control
from common.telemetry import get_logger

Guard = Callable[[str, str | None, str | None], bool]
"""Whether a call is allowed, by its path, its `Authorization` header and its client's host."""
CONTROL_PATHS: Final = ("/drain", "/switch")
LOOPBACK_HOSTS: Final = ("127.0.0.1", "localhost", "::1")
_OPEN_PATHS: Final = frozenset({"/health", "/ready", "/ping"})
KEY_PROTOCOL: Final = "openai-insecure-api-key."
"""Begin of a websocket's subprotocol that holds the key: browsers cannot send a header."""
_METRICS_PATHS: Final = frozenset({"/metrics", "/metrics/cluster", "/metrics/targets"})

log = get_logger()


class ApiKeys:
    """The keys of the API's users, read again once their file has changed.

    A file that cannot be read, or has no key any more, changes nothing: the last keys stay, and the log says why.
    """

    def __init__(self, settings: Settings) -> None:
        """Raises TriptychError("invalid_request") for a file that cannot be read or has no key."""
        self._settings = settings
        self._version = self._look()
        self._keys: TokenSet = api_keys(settings)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def accepts(self, authorization: str | None) -> bool:
        """Return whether an `Authorization` header holds one of the keys."""
        if (version := self._look()) != self._version:
            self._version = version
            try:
                self._keys = api_keys(self._settings)
                log.info("API keys read again", file=str(self._settings.api_key_file))
            except TriptychError as error:
                log.error("the API keys stay as they were", error=error.info.message)
        return self._keys.accepts(authorization)

    def _look(self) -> tuple[int, ...] | None:
        """Return what tells one content of the file from the next: also where a link now names another file."""
        try:
            found = None if self._settings.api_key_file is None else os.stat(self._settings.api_key_file)
        except OSError:
            return None
        return None if found is None else (found.st_mtime_ns, found.st_size, found.st_ino)


@dataclass(eq=False, repr=False)
class RequireKey:
    """Middleware that passes on the calls allowed by `guard`; `refusal` answers all others without reading a body."""

    app: ASGIApp
    guard: Guard
    refusal: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        if scope["type"] in ("http", "websocket"):
            given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"]
            keys = [one for one in scope.get("subprotocols", ()) if one.startswith(KEY_PROTOCOL)]
            given += [bearer(key.removeprefix(KEY_PROTOCOL)) for key in keys]
            header = given[0] if len(given) == 1 else None
            client = scope.get("client")
            if not self.guard(scope["path"], header, client[0] if client else None):
                app = self.refusal
        await app(scope, receive, send)


def _guard(settings: Settings, *, of_proxy: bool) -> Guard:
    """Return the guard of the OpenAI API, or of a worker's endpoints.

    Raises TriptychError("invalid_request") for a key file that cannot be read or has no key.
    """
    keys, token = ApiKeys(settings), cluster_token(settings)
    open_paths = _OPEN_PATHS | _METRICS_PATHS if settings.metrics_without_key else _OPEN_PATHS

    def allows(path: str, header: str | None, client: str | None) -> bool:
        if path in CONTROL_PATHS:
            return may_control(token, header, client)
        if path in open_paths or (of_proxy and (path == "/" or path.startswith("/page/"))):  # the page asks itself
            return True
        of_members = token is not None and not of_proxy
        return not (keys or of_members) or keys.accepts(header) or (of_members and may_control(token, header, client))

    return allows


proxy_guard, worker_guard = partial(_guard, of_proxy=True), partial(_guard, of_proxy=False)


def serves_anybody(settings: Settings) -> bool:
    """Return whether the API listens beyond this machine and asks for no key."""
    return settings.host not in LOOPBACK_HOSTS and not api_keys(settings)
