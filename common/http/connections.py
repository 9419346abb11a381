"""HTTP connections with limits: each must make progress, and their number is bounded.

uvicorn alone waits for ever for a slow request, so that any client that reaches the port could hold all descriptors
of the process ("slowloris"). Here every connection is in a phase, bounded by the period `client_timeout_s`:

    HEAD    accepted, or part of another request has come         the head is complete within one period
    BODY    the head is there, the body is on its way             MIN_BODY_BYTES_PER_S come in every period
    ANSWER  the request is complete                               the application's own deadline
    DRAIN   answered before the body was complete, as by a 401    the body ends within one period
    KEPT    answered, and no byte of a next request has come      uvicorn's keep-alive

A slow client gets a 408, or is cut off where no request is to be answered. Beyond `max_connections` a new connection
replaces the connection that has been without a request for longest. Where all connections have requests, are still
receiving answers, or are fresh, the new connection gets a 503. The rates are those of Apache's mod_reqtimeout.

One connection may not hold up others with parsing: at most PIECE_BYTES are read and parsed in one turn of the loop. A
body in too many tiny chunks is refused, or cut off if already answered.

h11 is chosen over httptools, uvicorn's other parser: h11 refuses a head that is incomplete after 16 KiB, and its states
tell the phases; httptools takes heads of any length. h11 is slower by microseconds, in requests of milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from http import HTTPStatus
from typing import Any, Final, Literal

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

MIN_BODY_BYTES_PER_S: Final = 500
FRESH_S: Final = 0.25
"""Age in seconds below which an idle connection is not replaced: in a burst all connections are idle."""
PIECE_BYTES: Final = 4 * 2**10
"""Read size. asyncio's own is 256 KiB, as tiny chunks a second of work for h11. Heads are limited by this size plus
h11's 16 KiB."""
BODY_PIECE_BYTES: Final = 64 * 2**10
"""Read size within a body of known length, where parsing is cheap."""
CHUNK_COST_BYTES: Final = 64
"""Charge per chunk, in bytes of data: parsing a tiny chunk costs as much as parsing a large chunk."""
SPARE_BYTES: Final = 1000 * CHUNK_COST_BYTES
"""Credit of a body: about a thousand chunks may be tiny, however large the earlier chunks were."""
DEFAULT_DESCRIPTORS: Final = 2**20
"""Assumed where the system sets no limit: Linux's default per process."""

Reason = Literal["timeout", "evicted", "refused", "invalid"]


class Phase(Enum):
    """State of a connection, see the module."""

    HEAD = auto()
    BODY = auto()
    ANSWER = auto()
    DRAIN = auto()
    KEPT = auto()


@dataclass
class ChunkGuard:
    """Balance of one body in chunks."""

    spare_bytes: int = SPARE_BYTES

    def are_too_many(self, num_bytes: int, *, begins: bool = True) -> bool:
        """Count `num_bytes` of a chunk, a new chunk if `begins`. Return whether the credit is used up."""
        self.spare_bytes = min(SPARE_BYTES, self.spare_bytes + num_bytes - begins * CHUNK_COST_BYTES)
        return self.spare_bytes < 0


@dataclass
class Connections:
    """Limits and idle connections (oldest first) of a server.

    `on_ended` receives the reason of every connection that is ended here.
    """

    limit: int
    period_s: float
    on_ended: Callable[[Reason], None] = lambda _: None
    idle: dict[BoundedProtocol, None] = field(default_factory=dict)
    buffer: memoryview = field(default_factory=lambda: memoryview(bytearray(BODY_PIECE_BYTES)))
    """Read buffer, shared: the bytes are parsed before another connection reads."""


class BoundedParser(h11.Connection):
    """Parser of a server's connection; a body in too many tiny chunks is invalid HTTP here."""

    num_coming = 0
    """Outstanding bytes of a body of known length."""
    _guard: ChunkGuard

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            headers = dict(event.headers)
            self.num_coming = 0 if b"transfer-encoding" in headers else int(headers.get(b"content-length", 0))
            self._guard = ChunkGuard()
        elif isinstance(event, h11.Data):
            size = len(event.data)
            if self.num_coming:
                self.num_coming -= size
            elif self._guard.are_too_many(size, begins=event.chunk_start):
                raise h11.RemoteProtocolError("too many tiny chunks")
        return event


class BoundedProtocol(H11Protocol, asyncio.BufferedProtocol):
    """HTTP/1.1 on one connection with limits on time and on the bytes per read."""

    conn: BoundedParser

    def __init__(
        self,
        connections: Connections,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = BoundedParser(h11.SERVER)
        self._all = connections
        self._phase: Phase | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._since_s = 0.0
        self._num_read = 0
        self._held_back = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._all.limit and not self._evict_oldest():
            self._end("refused", _error_bytes(503, "unavailable", "too many connections; try again shortly"))
        else:
            self._enter_phase(Phase.HEAD)

    def connection_lost(self, exc: Exception | None) -> None:
        self._exit_phase()
        super().connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._all.buffer[: max(PIECE_BYTES, self.conn.num_coming)]

    def buffer_updated(self, nbytes: int) -> None:
        self._num_read += nbytes
        self.data_received(bytes(self._all.buffer[:nbytes]))
        self._update_phase()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_phase()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are no valid HTTP. uvicorn's own method breaks if an answer has been sent already."""
        message = "not HTTP/1.1, or a head of more than 16 KiB, or a body in too many tiny chunks"
        answered = self._phase is Phase.DRAIN
        self._end("invalid", b"" if answered else _error_bytes(400, "invalid_request", message))

    def _update_phase(self) -> None:
        if self.transport.is_closing() or self.transport.get_protocol() is not self:  # now a websocket
            self._exit_phase()
            return
        match self.conn.their_state:
            case h11.IDLE:
                begun = self.cycle is None or self.conn.trailing_data[0]
                phase = Phase.HEAD if begun else Phase.KEPT
            case h11.SEND_BODY:
                phase = Phase.DRAIN if self.cycle.response_complete else Phase.BODY
            case _:
                phase = Phase.ANSWER
        if phase is not self._phase:
            self._enter_phase(phase)

    def _enter_phase(self, phase: Phase) -> None:
        """Start a phase, or the next period of a body."""
        self._exit_phase()
        self._phase, self._since_s = phase, self.loop.time()
        self._num_read, self._held_back = 0, self.flow.read_paused
        if phase in (Phase.HEAD, Phase.DRAIN, Phase.KEPT):
            self._all.idle[self] = None
        if phase in (Phase.HEAD, Phase.DRAIN, Phase.BODY):
            self._timer = self.loop.call_later(self._all.period_s, self._end_of_period)
        elif phase is Phase.KEPT and self.timeout_keep_alive_task is None:
            # After DRAIN: uvicorn's timer ran from the answer, and the rest of the body has stopped it.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _exit_phase(self) -> None:
        self._all.idle.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_of_period(self) -> None:
        # A body may be slow where the application did not take the bytes that were there.
        held_back = self._held_back or self.flow.read_paused
        fast_enough = held_back or self._num_read >= MIN_BODY_BYTES_PER_S * self._all.period_s
        if self._phase is Phase.BODY and fast_enough:
            self._enter_phase(Phase.BODY)
        elif self._phase is Phase.DRAIN or (self._phase is Phase.HEAD and not self.conn.trailing_data[0]):
            self._end("timeout", b"")
        else:
            self._end("timeout", _error_bytes(408, "timeout", "the request took too long to come"))

    def _evict_oldest(self) -> bool:
        """End the connection that has been idle for longest. Return False if none can be ended.

        A connection must have its whole answer: uvicorn's write is complete when the transport has the bytes, long
        before a slow client has. Nor may it be fresh.
        """
        for oldest in self._all.idle:
            fresh = oldest._phase is Phase.HEAD and self.loop.time() - oldest._since_s < FRESH_S
            if not oldest.transport.get_write_buffer_size() and not fresh:
                oldest._end("evicted", b"")
                return True
        return False

    def _end(self, reason: Reason, answer: bytes) -> None:
        """Close the connection, with `answer` if the request has none; its application sees a disconnect."""
        self._exit_phase()
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if answer and (self.cycle is None or not self.cycle.response_started or self.cycle.response_complete):
            self.transport.write(answer)
            self.transport.close()
        else:
            self.transport.abort()  # bytes left in its buffer must not keep it open
        self._all.on_ended(reason)


class BoundedWebSocket(WebSocketsSansIOProtocol, asyncio.BufferedProtocol):
    """A websocket that reads little at once, and nothing while its client does not read the answers."""

    _buffer = memoryview(bytearray(PIECE_BYTES))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._buffer[:nbytes]))

    def pause_writing(self) -> None:
        super().pause_writing()
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.read_paused:
            self.transport.resume_reading()


def allowed_connections(wanted: int) -> int:
    """Return `wanted`, or half of the descriptors that this process may have, if fewer.

    The process's soft limit of descriptors is raised as far as the system permits.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DEFAULT_DESCRIPTORS if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY or soft >= most:
        return min(wanted, most // 2)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return min(wanted, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


def _error_bytes(status: int, code: str, message: str) -> bytes:
    """Return a whole response with an error in OpenAI's shape; the connection ends after it."""
    phrase, kind = HTTPStatus(status).phrase, "server_error" if status >= 500 else "invalid_request_error"
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})
    again = "Retry-After: 1\r\n" if status == 503 else ""
    head = f"HTTP/1.1 {status} {phrase}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{again}"
    return f"{head}Connection: close\r\n\r\n{body}".encode("ascii")
