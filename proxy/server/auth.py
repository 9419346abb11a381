"""Answers to callers with and without API keys. The rules of access are in `common.http.auth`."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from common.config import Settings
from common.errors import ErrorInfo
from common.keys import api_keys
from proxy.server.errors import error_response


async def refusal(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with OpenAI's 401; the given key appears nowhere."""
    given = "authorization" in Request(scope).headers
    message = "the API key is not one of this server's" if given else "this server wants an API key"
    info = ErrorInfo("invalid_api_key", f"{message}: send it as `Authorization: Bearer KEY`")
    await error_response(info)(scope, receive, send)


def key_check(settings: Settings) -> Callable[[Request], bool]:
    """Return a check whether the caller of an open path may see details of the cluster: a key, or no keys at all."""
    keys = api_keys(settings)

    def has_key(request: Request) -> bool:
        given = request.headers.getlist("authorization")
        return not keys or keys.accepts(given[0] if len(given) == 1 else None)

    return has_key
