"""What a caller without a valid API key is told, as OpenAI's clients know it. Who needs one: `common.http_auth`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from common.errors import ErrorInfo
from proxy.errors import error_response


async def refusal(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with 401; the given key, right or wrong, appears nowhere."""
    given = "authorization" in Request(scope).headers
    message = "the API key is not one of this server's" if given else "this server wants an API key"
    info = ErrorInfo("invalid_api_key", f"{message}: send it as `Authorization: Bearer KEY`")
    await error_response(info)(scope, receive, send)
