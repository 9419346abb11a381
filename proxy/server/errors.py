"""Errors in OpenAI's shape, on every route: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import FailFast, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.types import Receive, Scope, Send

from common.errors import ErrorInfo, TriptychError, closest, invalid
from common.http.auth import CONTROL_PATHS
from common.telemetry import get_logger

RETRY_AFTER_S: Final = 1
_TYPES: Final = {404: "not_found_error", 429: "rate_limit_error"}

_SERVED: Final = (
    "/v1/chat/completions, /v1/responses, /v1/completions, /v1/audio/transcriptions and /v1/audio/translations"
)
_ROUTES: Final = ("/v1/models", *_SERVED.replace(" and ", ", ").split(", "))
_UNSERVED: Final = {
    "/v1/embeddings": "embeddings",
    "/v1/moderations": "moderations",
    "/v1/images": "generated images",
    "/v1/videos": "generated videos",
    "/v1/audio/speech": "spoken answers",
    "/v1/rerank": "rankings",
    "/v2/rerank": "rankings",
    "/rerank": "rankings",
    "/v1/score": "scores",
    "/score": "scores",
    "/pooling": "embeddings",
    "/v1/files": "files",
    "/v1/uploads": "files",
    "/v1/batches": "batches",
    "/v1/fine_tuning": "fine-tuning jobs",
    "/v1/assistants": "assistants",
    "/v1/threads": "threads",
    "/v1/vector_stores": "vector stores",
    "/v1/realtime": "realtime sessions without a websocket",
    "/v1/messages": "Anthropic's messages",
    "/api/": "Ollama's routes",
}
"""Refused with 404, which clients do not repeat as they do 501."""

log = get_logger()


class Overloaded(TriptychError):
    """Refusal of a request under load, worth repeating after `retry_after_s` whole seconds."""

    def __init__(self, message: str, retry_after_s: int = RETRY_AFTER_S) -> None:
        super().__init__("overloaded", message)
        self.retry_after_s = retry_after_s


class _FirstError(FailFast):
    """FailFast with a hash: pydantic's own cannot be part of a union."""

    __hash__ = object.__hash__


FIRST_ERROR: Final = _FirstError()
"""Marks lists that report only the first wrong value: a million errors take seconds of the loop."""


def error_body(info: ErrorInfo, status: int | None = None) -> dict[str, Any]:
    """Return an error as JSON, for an answer or for an event of a stream."""
    status = status or info.http_status
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": info.message, "type": kind, "param": info.param, "code": info.code}}


def error_response(info: ErrorInfo, status: int | None = None, headers: dict[str, str] | None = None) -> JSONResponse:
    headers = dict(headers or {})
    if info.code in ("overloaded", "unavailable"):
        headers.setdefault("Retry-After", str(RETRY_AFTER_S))
    if info.code == "invalid_api_key":
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(info, status), status or info.http_status, headers)


def note_failure(request: Request, error: Exception) -> ErrorInfo:
    """Log an error that is the server's. Return it as it is told, and counted: a stream has no place for its status."""
    request_id = getattr(request.state, "request_id", None)
    if isinstance(error, TriptychError):
        info = error.info
        if info.http_status >= 500:
            log.warning("request failed", request=request_id, code=info.code, error=info.message)
    else:
        info = ErrorInfo("internal_error", "an unexpected error in the proxy; its log has the details")
        log.error("unexpected error", path=request.url.path, request=request_id, exc_info=error)
    request.state.status = info.http_status
    return info


async def refusal(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with OpenAI's 401; the given key appears nowhere."""
    given = "authorization" in HTTPConnection(scope).headers or bool(scope.get("subprotocols"))
    message = "the API key is not one of this server's" if given else "this server wants an API key"
    message += ": send it as `Authorization: Bearer KEY`"
    if scope["path"] in CONTROL_PATHS:
        message = f"{scope['path']} wants the cluster's token, not an API key: use `triptych drain ID`, which sends it"
    info = ErrorInfo("invalid_api_key", message)
    await error_response(info)(scope, receive, send)


def from_validation(error: ValidationError, known: Iterable[str] = ()) -> TriptychError:
    """Return the first error of pydantic, with path and value of the field; of an unknown one, which was meant."""
    first = error.errors(include_url=False)[0]
    param = field_path(first["loc"]) or None
    if first["type"] == "json_invalid":
        return invalid(f"the body is not valid JSON: {first['msg']}")
    about = first.get("ctx", {})
    match first["type"]:
        case "extra_forbidden":
            name = f"{param or first['loc'][-1]!s:.80}"
            return invalid(f"{name} is not a known field: leave it out{closest(name, known)}", param)
        case "too_short":
            least, found = about["min_length"], about["actual_length"]
            return invalid(f"{param} needs at least {least} item{'s' * (least > 1)}, it has {found}", param)
        case "too_long":
            return invalid(f"{param} takes at most {about['max_length']} items, more were given", param)
    value = "" if first["type"] == "missing" else f", not {shown(first.get('input'))}"
    message = first["msg"].removeprefix("Value error, ")
    return invalid(f"{param or 'body'}: {message}{value}", param)


def refuse_unsupported(
    fields: Mapping[str, Any] | None, ignored: Container[str], off: Mapping[str, tuple[Any, ...]], known: Iterable[str]
) -> None:
    """Raise TriptychError("invalid_request") for a field that is not `ignored`, nor has one of its values of `off`."""
    for name, value in (fields or {}).items():
        if value is not None and name not in off and name not in ignored:
            raise invalid(f"{name:.80} is not a known field: leave it out{closest(name[:80], known)}", name[:80])
        if name in off and (value, type(value) is bool) not in ((one, type(one) is bool) for one in off[name]):
            raise unsupported(name, value)


def unsupported(name: str, value: object) -> TriptychError:
    """Return the error of a field that is known, but not supported with this value."""
    return invalid(f"{name} is not supported ({shown(value)} was given): leave it out", name)


def field_path(loc: Sequence[int | str]) -> str:
    """Write ("messages", 0, "content") as messages[0].content, without names of union members (in capitals)."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.replace("_", "a").isidentifier() and part.islower():
            path += f".{part}" if path else part
    return path


def install(app: FastAPI) -> None:
    """Install handlers for every error of `app`, unknown routes and bugs included."""

    @app.exception_handler(TriptychError)
    @app.exception_handler(Exception)
    async def on_error(request: Request, error: Exception) -> JSONResponse:
        info = note_failure(request, error)
        request_id = getattr(request.state, "request_id", None)
        headers = {"x-request-id": request_id} if request_id else {}
        if isinstance(error, Overloaded):
            headers["Retry-After"] = str(error.retry_after_s)
        elif not isinstance(error, TriptychError):
            headers["Connection"] = "close"  # as uvicorn does
        return error_response(info, headers=headers)

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> JSONResponse:
        path = request.url.path
        messages = {404: f"no route {path}{_instead(path)}", 405: f"{request.method} is not allowed here"}
        messages[405] += f": use {allowed}" if (allowed := (error.headers or {}).get("Allow")) else ""
        message = messages.get(error.status_code, str(error.detail))
        code = "not_found" if error.status_code == 404 else "invalid_request"
        headers = dict(error.headers) if error.headers else None
        return error_response(ErrorInfo(code, message), error.status_code, headers)  # type: ignore[arg-type]


def _instead(path: str) -> str:
    """Return the end of a sentence for a route that is not served: what is, or which is like it."""
    what = next((what for prefix, what in _UNSERVED.items() if path.startswith(prefix)), None)
    return closest(path[:80], _ROUTES) if what is None else f": {what} are not served here, only {_SERVED}"


def shown(value: object) -> str:
    """Return a value for a message: whole, or its first words and an ellipsis."""
    text = repr(value[:80] if isinstance(value, str | list) else value)
    if len(text) <= 80 and not (isinstance(value, str | list) and len(value) > 80):
        return text
    return (text[:76].rpartition(" ")[0] or text[:76]).rstrip(",:;") + " …"
