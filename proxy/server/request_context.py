"""HTTP requests that generate: admission, body, answer or stream, and cleanup after any end.

An endpoint is an async generator of payloads. The first payload decides: a `Response` is the whole answer, `Sse` starts
a stream. Nothing is sent before the first payload, so an error gets its real status.

A streamed token of a chat passes three generators (of a completion four, by `merge_streams`; of a recording six, by
`Speech`), each of which closes the generator below in its own `finally`:

    JobRunner.tokens -> TextStream.deltas -> the endpoint -> EventStream._send (writes to the client)

Every end (the last token, an error, a timeout, a client that left) reaches `AdmissionController._end`. Closing the
endpoint there raises GeneratorExit at its `yield`, then in `deltas`, then in `tokens`, and `tokens` aborts its job on
all workers. Tickets, memory and the admission slot are released after that.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from common.errors import TriptychError, invalid
from common.telemetry import get_logger
from proxy.server.errors import Overloaded, error_body, note_failure
from proxy.server.limits import ByteBudget, RequestTickets, Reservation
from proxy.server.metrics import ProxyMetrics, Timelines

CLIENT_CLOSED_REQUEST: Final = 499
"""Seen in metrics only: the client has left."""
QUIET_S: Final = 1.5
"""Time without a request after which a draining proxy may go: balancers notice after some looks at /ready."""
_POLL_S: Final = 0.05
REQUEST_ID_HEADER: Final = "x-request-id"
_CLIENT_ID: Final = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
"""A client's own id: returned in the header and named in the log. Inside the cluster ids are ours: clients repeat
theirs."""
_LINE_ENDS: Final = {character.encode(): b"\\u%04x" % ord(character) for character in "\x85\u2028\u2029"}
"""Escaped: many clients (httpx, and others with Python's rules for lines) would end a line of an event here."""
_COMPRESSED: Final = ("gzip", "deflate", "br", "zstd")
_DEADLINE_GRACE_S: Final = 2.0
"""Jobs end at the deadline with a better message; the grace is for work without a deadline."""

T = TypeVar("T")
log = get_logger()


@dataclass(frozen=True)
class Sse:
    """One event of a stream, with a name or without; None ends it with [DONE]."""

    value: dict[str, Any] | None
    name: str | None = None


Payload = Response | Sse


@dataclass
class RequestContext:
    """An HTTP request as the endpoint sees it, and the figures that are logged at the end."""

    request: Request
    id: str
    given_id: str
    """The client's own id, where it gave one."""
    created_s: float
    """Unix time; the others are of the monotonic clock."""
    arrival_s: float
    deadline_s: float
    max_body_bytes: int
    held: Reservation
    """Memory of this request for body and media."""
    body_read: asyncio.Event = field(default_factory=asyncio.Event)
    tickets: RequestTickets | None = None
    """Tickets of the request's jobs in a queue for first tokens, once the endpoint has chosen the queue."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_token_s: float | None = None
    outcome: str = "client_left"
    """"ok", the code of an error, or "client_left": neither answer nor error came before."""

    async def stream(self) -> AsyncGenerator[bytes]:
        """Yield the body as it comes.

        Raises TriptychError("item_too_large") over the limit and Overloaded without memory, for the declared size
        before any read; "invalid_request" for a compressed body.
        """
        if (coding := self.request.headers.get("content-encoding", "")).lower() in _COMPRESSED:
            raise invalid(f"a body with the Content-Encoding {coding} is not supported: send it uncompressed")
        declared = self.request.headers.get("content-length", "")
        reserved = self._reserve(0, int(declared)) if declared.isdecimal() else 0
        size = 0
        async for chunk in self.request.stream():
            size += len(chunk)
            reserved = self._reserve(reserved, size)
            yield chunk
        self.body_read.set()

    def _reserve(self, reserved: int, size: int) -> int:
        """Reserve memory for a body of at least `size` bytes, of which `reserved` have memory. Returns the new sum."""
        if size > self.max_body_bytes:
            message = f"the request body has {size} bytes or more, at most {self.max_body_bytes} are allowed"
            raise TriptychError("item_too_large", f"{message} (--max-body-bytes)")
        if size > reserved:
            self.held.reserve(size - reserved)
        return max(size, reserved)


Endpoint = Callable[[RequestContext], AsyncGenerator[Payload]]


@dataclass
class AdmissionController:
    """Limits of requests and their bytes in the proxy at once; more are refused before their bodies are read.

    The `limit` of requests is the cluster's: each of its proxies, which `num_proxies` counts, admits an equal share.
    """

    limit: int
    budget: ByteBudget
    timeout_s: float
    metrics: ProxyMetrics
    timelines: Timelines
    model: str
    num_proxies: Callable[[], int] = lambda: 1
    inflight: int = 0
    closing: bool = False
    draining: bool = False
    """Whether this proxy is to get no new requests; those that come all the same are served."""

    async def drain(self, wait_s: float) -> int:
        """Stop being ready. Returns the number of requests under way: at once, or after QUIET_S without any, after
        `wait_s` seconds at the latest."""
        self.draining = True
        end_s, quiet_since_s = time.monotonic() + wait_s, time.monotonic()
        while (now_s := time.monotonic()) < end_s and now_s - quiet_since_s < QUIET_S:
            await asyncio.sleep(_POLL_S)
            if self.inflight:
                quiet_since_s = time.monotonic()
        return self.inflight

    async def answer(self, request: Request, prefix: str, max_body_bytes: int, endpoint: Endpoint) -> Response:
        """Answer a request by `endpoint`; the request id begins with `prefix`.

        Raises the errors of `endpoint` before the first payload, and those of `admit`.
        """
        context = self.admit(request, prefix, max_body_bytes)
        headers = {REQUEST_ID_HEADER: context.given_id}
        payloads = endpoint(context)
        stream: EventStream | None = None
        try:
            first = await _unless_disconnected(context, anext(payloads))
            if isinstance(first, Sse):
                stream = EventStream(first, payloads, context, self._end, headers)
                return stream
            context.outcome = "ok"
            first.headers.update(headers)
            return first
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception as error:
            context.outcome = error.info.code if isinstance(error, TriptychError) else "internal_error"
            raise
        finally:
            if stream is None:
                await self._end(context, payloads)

    def admit(self, request: Request, prefix: str, max_body_bytes: int) -> RequestContext:
        """Return the context of a request that is under way until `release`. Raises Overloaded over the limit."""
        request_id = f"{prefix}{uuid.uuid4().hex}"
        given = request.headers.get(REQUEST_ID_HEADER, "")
        request.state.request_id = header_id = given if _CLIENT_ID.fullmatch(given) else request_id
        if self.closing:
            self.metrics.refused.labels("closing").inc()
            raise TriptychError("unavailable", "the server is shutting down; try again shortly")
        if self.inflight >= (share := max(1, self.limit // self.num_proxies())):
            self.metrics.refused.labels("inflight").inc()
            message = f"{self.inflight} requests are under way, at most {share} are allowed (--max-inflight)"
            raise Overloaded(f"{message}; try again shortly")
        self.inflight += 1
        self.metrics.inflight.inc()
        now_s = time.monotonic()
        deadline_s = now_s + self.timeout_s
        held = Reservation(self.budget)
        context = RequestContext(request, request_id, header_id, time.time(), now_s, deadline_s, max_body_bytes, held)
        traceparent = request.headers.get("traceparent")
        self.timelines.open(request_id, request.url.path, self.model, context.created_s, traceparent)
        log.debug("request accepted", request=request_id, route=request.url.path)
        return context

    async def _end(self, context: RequestContext, payloads: AsyncGenerator[Payload]) -> None:
        """Close the endpoint, which aborts unfinished jobs, and release the request."""
        try:
            await payloads.aclose()
        finally:
            if context.first_token_s is not None:
                self.metrics.latency.observe(time.monotonic() - context.arrival_s)
            self.release(context)

    def release(self, context: RequestContext) -> None:
        """Release all resources of a request, and log its end."""
        if context.tickets is not None:
            context.tickets.release()
        context.held.release()
        self.inflight -= 1
        self.metrics.inflight.dec()
        first_s, now_s = context.first_token_s, time.monotonic()
        figures = {
            "prompt_tokens": context.prompt_tokens,
            "completion_tokens": context.completion_tokens,
            "ttft_ms": None if first_s is None else round(1000 * (first_s - context.arrival_s)),
            "total_ms": round(1000 * (now_s - context.arrival_s)),
            "outcome": context.outcome,
        }
        stages_ms = self.timelines.close(context.id, figures)
        client: dict[str, Any] = {} if context.given_id == context.id else {"client_request": context.given_id}
        client |= {"route": context.request.url.path, "model": self.model, "stages_ms": stages_ms}
        log.info("request ended", request=context.id, **client, **figures)


async def _unless_disconnected(context: RequestContext, work: Awaitable[T]) -> T:
    """Return the result of `work`. Raises ClientDisconnect, and cancels `work`, where the client leaves first.

    Raises TriptychError: "timeout" after the request's deadline, a slow upload included; "unavailable" when cancelled.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.create_task(_disconnected(context.request.receive, context.body_read))
    try:
        remaining_s = context.deadline_s + _DEADLINE_GRACE_S - time.monotonic()
        await asyncio.wait({task, watcher}, timeout=remaining_s, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if watcher.done():
            raise ClientDisconnect
        raise TriptychError("timeout", "the request did not end within the server's request_timeout_s")
    except asyncio.CancelledError as error:  # by uvicorn, once the time of a stopping server is over
        raise TriptychError("unavailable", "the server is shutting down; try again shortly") from error
    finally:
        watcher.cancel()
        task.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive, body_read: asyncio.Event) -> None:
    """Return once the client has left."""
    await body_read.wait()  # until then the endpoint reads from the connection itself
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events: `first`, then the rest of `payloads`. Every end is followed by `end`."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: Sse,
        payloads: AsyncGenerator[Payload],
        context: RequestContext,
        end: Callable[[RequestContext, AsyncGenerator[Payload]], Awaitable[None]],
        headers: dict[str, str],
    ) -> None:
        self._first = first
        self._payloads = payloads
        self._context = context
        self._end = end
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _unless_disconnected(self._context, self._send(send))
        except ClientDisconnect:
            self._context.request.state.status = CLIENT_CLOSED_REQUEST
        except TriptychError as error:  # past the deadline, or as the server stops: the stream is cut
            self._context.outcome = note_failure(self._context.request, error).code
        finally:
            await self._end(self._context, self._payloads)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send(_event(self._first))
        try:
            async for payload in self._payloads:
                assert isinstance(payload, Sse)
                await send(_event(payload))
            self._context.outcome = "ok"
        except Exception as error:
            info = note_failure(self._context.request, error)
            self._context.outcome = info.code
            await send(_event(Sse(error_body(info))))
            await send(_event(Sse(None)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def json_answer(value: dict[str, Any]) -> Response:
    """Return a whole answer. Its JSON is msgspec's: with log-probabilities it may have many megabytes."""
    return Response(msgspec.json.encode(value), media_type="application/json")


def _event(event: Sse) -> Message:
    data = b"[DONE]" if event.value is None else msgspec.json.encode(event.value)
    if not data.isascii():
        for character, escape in _LINE_ENDS.items():
            data = data.replace(character, escape)
    name = "" if event.name is None else f"event: {event.name}\n"
    return {"type": "http.response.body", "body": b"%sdata: %s\n\n" % (name.encode(), data), "more_body": True}
