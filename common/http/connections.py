"""The connections of an HTTP server: each has to get on, and there are only so many of them.

uvicorn alone waits for ever for a request that does not come, or comes a byte now and then, so that whoever reaches the
port, with a key or without one, could hold all of a process's descriptors ("slowloris"). Here every connection is in a
phase, and the period of `client_timeout_s` bounds it:

    HEAD    accepted, or something of another request has come    the head is complete within one period
    BODY    the head is there, the body is on its way             MIN_BODY_BYTES_PER_S come in every period
    ANSWER  the request is complete                               the application's own deadline
    DRAIN   answered before the body was complete, as by a 401    the body ends within one period
    KEPT    answered, and nothing else has come                   uvicorn's keep-alive

Whoever is too slow gets a 408, or is just cut off where there was nothing to answer. Beyond `max_connections` the one
that has been without a request for longest makes room for a new one; where all have requests, are still taking
their answers, or have only just come, the new one gets a 503. The rates are those of Apache's mod_reqtimeout.

Nor may a connection bring so much to parse that others wait: PIECE_BYTES are read and parsed at a time, then others
have their turn, and a body in too many tiny chunks is refused, or cut off where there is an answer already.

This stands on h11 and not on httptools, uvicorn's other parser, on purpose: h11 gives up a head that is not complete
after 16 KiB, and its states tell the phases, where httptools takes heads of any length. It is slower by microseconds,
of requests that take milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final, Literal

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from common.http.chunk_guard import ChunkGuard

MIN_BODY_BYTES_PER_S: Final = 500
FRESH_S: Final = 0.25
"""A connection that has come within so long is left its time to say what it wants: in a burst all of them are idle."""
PIECE_BYTES: Final = 4 * 2**10
"""By itself asyncio hands over 256 KiB at once, which as tiny chunks take h11 a second. No head can be larger than this
and what h11 keeps of an incomplete one."""
BODY_PIECE_BYTES: Final = 64 * 2**10
"""Of a body whose length is known, in which there is nothing to parse."""
DEFAULT_DESCRIPTORS: Final = 2**20
"""Where the system sets no limit: as many as Linux gives a process by default."""

Reason = Literal["timeout", "evicted", "refused", "invalid"]


class Phase(Enum):
    """What a connection is waiting for."""

    HEAD = auto()
    BODY = auto()
    ANSWER = auto()
    DRAIN = auto()
    KEPT = auto()


@dataclass
class Connections:
    """The limits of one server's connections, and those that have no request under way, the oldest first.

    `on_ended` is told of every connection that is ended here, and why.
    """

    limit: int
    period_s: float
    on_ended: Callable[[Reason], None] = lambda _: None
    idle: dict[BoundedProtocol, None] = field(default_factory=dict)
    buffer: memoryview = field(default_factory=lambda: memoryview(bytearray(BODY_PIECE_BYTES)))
    """Where the next piece is read to; it is parsed before another connection reads."""


class BoundedConfig(uvicorn.Config):
    """uvicorn's configuration of a server with bounded connections; `options` are uvicorn's."""

    def __init__(self, app: Any, connections: Connections, **options: Any) -> None:
        super().__init__(app, http=BoundedProtocol, **options)
        self.connections = connections


class BoundedParser(h11.Connection):
    """The parser of a server's connection; a body in too many tiny chunks is no valid HTTP for it."""

    num_coming = 0
    """Bytes of the body that are still to come, where that is known."""

    def __init__(self, our_role: type[h11.CLIENT] | type[h11.SERVER]) -> None:
        super().__init__(our_role)
        self._chunks = ChunkGuard()

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            headers = dict(event.headers)
            sized = b"transfer-encoding" not in headers
            self.num_coming, self._chunks = int(headers.get(b"content-length", 0)) if sized else 0, ChunkGuard()
        elif isinstance(event, h11.Data):
            size = len(event.data)
            self.num_coming = max(0, self.num_coming - size)
            if self._chunks.are_too_many(size, begins=event.chunk_start):
                raise h11.RemoteProtocolError("too many tiny chunks")
        return event


class BoundedProtocol(H11Protocol, asyncio.BufferedProtocol):
    """HTTP/1.1 on one connection that has to get on, and that asyncio reads by pieces of the size that is said here."""

    conn: BoundedParser

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        assert isinstance(config, BoundedConfig)
        self.conn = BoundedParser(h11.SERVER)
        self._all = config.connections
        self._phase: Phase | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._since_s = 0.0
        self._num_read = 0
        self._held_back = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._all.limit and not self._make_room():
            self._end("refused", _answer(503, "unavailable", "too many connections; try again shortly"))
        else:
            self._enter(Phase.HEAD)

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        super().connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._all.buffer[: max(PIECE_BYTES, self.conn.num_coming)]

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._all.buffer[:nbytes]))

    def data_received(self, data: bytes) -> None:
        self._num_read += len(data)
        super().data_received(data)
        self._observe()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._observe()

    def send_400_response(self, msg: str) -> None:
        """What came is not HTTP, or too much of it. uvicorn's own breaks where there is an answer already."""
        message = "not HTTP/1.1, or a head of more than 16 KiB, or a body in too many tiny chunks"
        answered = self._phase is Phase.DRAIN
        self._end("invalid", b"" if answered else _answer(400, "invalid_request", message))

    def _observe(self) -> None:
        """Something has happened: is it another phase?"""
        if self.transport.is_closing():
            self._leave()
        elif (phase := self._current()) is not self._phase:
            self._enter(phase)

    def _current(self) -> Phase:
        theirs = self.conn.their_state
        if theirs is h11.IDLE:
            begun = self.cycle is None or self.conn.trailing_data[0]
            return Phase.HEAD if begun else Phase.KEPT
        if theirs is h11.SEND_BODY:
            return Phase.DRAIN if self.cycle.response_complete else Phase.BODY
        return Phase.ANSWER

    def _enter(self, phase: Phase) -> None:
        """A phase begins, or the next period of a body."""
        self._leave()
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

    def _leave(self) -> None:
        self._all.idle.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_of_period(self) -> None:
        if self._phase is Phase.BODY and self._has_got_on():
            self._enter(Phase.BODY)
        elif self._phase is Phase.DRAIN or (self._phase is Phase.HEAD and not self.conn.trailing_data[0]):
            self._end("timeout", b"")
        else:
            self._end("timeout", _answer(408, "timeout", "the request took too long to come"))

    def _has_got_on(self) -> bool:
        """Enough has come, or more would have but for us: the application did not take what was there."""
        waited_for_us = self._held_back or self.flow.read_paused
        return waited_for_us or self._num_read >= MIN_BODY_BYTES_PER_S * self._all.period_s

    def _make_room(self) -> bool:
        """End the connection that has been idle for longest, of those that have all of their answer: uvicorn's write is
        complete when the transport has it, and a slow client takes much longer. False where there is none."""
        for oldest in self._all.idle:
            if not oldest.transport.get_write_buffer_size() and not oldest._is_fresh():
                oldest._end("evicted", b"")
                return True
        return False

    def _is_fresh(self) -> bool:
        return self._phase is Phase.HEAD and self.loop.time() - self._since_s < FRESH_S

    def _end(self, reason: Reason, answer: bytes) -> None:
        """Close the connection, with an answer if it has none yet; an application that reads from it sees it gone."""
        self._leave()
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if answer and (self.cycle is None or not self.cycle.response_started or self.cycle.response_complete):
            self.transport.write(answer)
            self.transport.close()
        else:
            self.transport.abort()  # whatever is left in its buffer must not keep it open
        self._all.on_ended(reason)


def allowed_connections(wanted: int) -> int:
    """As many of the wanted connections as leave half of the descriptors that this process may have for all else.

    Raises the process's soft limit of descriptors as far as the system lets it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DEFAULT_DESCRIPTORS if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY or soft >= most:
        return min(wanted, most // 2)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return min(wanted, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


def _answer(status: int, code: str, message: str) -> bytes:
    """A whole response with an error in OpenAI's shape, after which the connection ends."""
    phrase, kind = {
        400: ("Bad Request", "invalid_request_error"),
        408: ("Request Timeout", "invalid_request_error"),
        503: ("Service Unavailable", "server_error"),
    }[status]
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})
    again = "Retry-After: 1\r\n" if status == 503 else ""
    head = f"HTTP/1.1 {status} {phrase}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{again}"
    return f"{head}Connection: close\r\n\r\n{body}".encode("ascii")
