"""What a caller without a valid API key is told, and what is told to the others only. Who needs one:
`common.http.auth`."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from common.config import Settings
from common.errors import ErrorInfo
from common.keys import api_keys
from proxy.server.errors import error_response


async def refusal(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with 401, as OpenAI's clients know it; the given key, right or wrong, appears nowhere."""
    given = "authorization" in Request(scope).headers
    message = "the API key is not one of this server's" if given else "this server wants an API key"
    info = ErrorInfo("invalid_api_key", f"{message}: send it as `Authorization: Bearer KEY`")
    await error_response(info)(scope, receive, send)


def key_check(settings: Settings) -> Callable[[Request], bool]:
    """Tells whether a caller of an open path has a key, or nobody needs one: it may be told who is in the cluster."""
    keys = api_keys(settings)

    def has_key(request: Request) -> bool:
        given = request.headers.getlist("authorization")
        return not keys or keys.accepts(given[0] if len(given) == 1 else None)

    return has_key
