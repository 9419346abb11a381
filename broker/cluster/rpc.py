"""Requests, aborts and token streams between proxies and workers, over ZMQ.

    proxy: WorkerClient (DEALER, one per worker)  <-->  worker: WorkerServer (ROUTER)

A message is one frame of MessagePack; the routing id identifies the proxy. What a worker sends to a proxy at once, the
tokens of a step, is one ZMQ message of several frames: a send and a wake-up cost more than most frames. Sending never
waits: a peer that does not take its messages is treated as gone.

For a message above the receiver's MAXMSGSIZE libzmq closes the connection, with all its requests. So the sender checks
the size first, and only the one request fails.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Literal, cast

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from broker.cluster.curve import OVERHEAD_BYTES, secure_bind, secure_connect
from common.errors import TriptychError
from common.messages import (
    MAX_CONTROL_BYTES,
    MAX_MEDIA_BYTES,
    Encoded,
    Failed,
    FromWorker,
    Heartbeat,
    Prefilled,
    ToWorker,
    decode_from_worker,
    decode_to_worker,
    encode,
)
from common.telemetry import get_logger

QUEUE_MESSAGES = 4_096
"""Messages, of a step's tokens each, that may wait at a worker for one proxy before it counts as gone."""
QUEUE_REQUESTS = 4_096
"""Requests (with media) that may wait at a proxy for one worker."""
MAX_TO_WORKER_BYTES: Final = MAX_MEDIA_BYTES + MAX_CONTROL_BYTES
MAX_FROM_WORKER_BYTES: Final = MAX_CONTROL_BYTES

Outcome = Literal["sent", "too_large", "gone"]
"""Of an answer. A proxy is gone where its connection is broken or its queue full."""

log = get_logger()


def life_id(instance_id: str, epoch: int) -> str:
    """Return the name of a process: an instance that starts again is another."""
    return f"{instance_id}@{epoch}"


def connection_id(instance_id: str, epoch: int, number: int) -> str:
    """Return the name of a proxy's connection at workers: new for each connection, with a growing `number`."""
    return f"{life_id(instance_id, epoch)}.{number}"


def supersedes(connection: bytes, other: bytes) -> bool:
    """Return whether a proxy made `connection` after `other`, to replace the older connection."""
    proxy, _, number = connection.rpartition(b".")
    other_proxy, _, other_number = other.rpartition(b".")
    numbered = number.isdigit() and other_number.isdigit()
    return proxy == other_proxy and numbered and int(number) > int(other_number)


class WorkerServer:
    """The worker's end: receives from any number of proxies, and answers each by routing id."""

    def __init__(self, context: zmq.asyncio.Context, host: str = "127.0.0.1", life: str = "") -> None:
        """Bind a free port on `host`; `address` is the endpoint for clients on this network, which learn the `life`."""
        self._socket = context.socket(zmq.ROUTER)
        _set_common_options(self._socket)
        if life:
            self._socket.setsockopt(zmq.IDENTITY, life.encode())
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a proxy that is gone is an error we want to see
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a proxy that reconnects takes over its own routing id
        self._socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_TO_WORKER_BYTES + OVERHEAD_BYTES)
        self.address = secure_bind(self._socket, host)
        self.num_invalid = 0

    async def receive(self) -> tuple[bytes, ToWorker]:
        """Return the next valid message and the routing id of its proxy. Invalid messages are counted and discarded."""
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            try:
                if len(frames) != 2:
                    raise TriptychError("invalid_request", f"a request has 1 frame, not {len(frames) - 1}")
                return bytes(frames[0].buffer), decode_to_worker(frames[1].buffer)
            except TriptychError as error:
                self.num_invalid += 1
                log.warning("dropped a message on the request socket", error=error.info.message)

    def send(self, proxy: bytes, *messages: FromWorker | Heartbeat) -> list[Outcome]:
        """Send to a proxy, at once and in order. Return the outcome of each message.

        The request of an answer that is "too_large" has ended for its proxy, with an error "item_too_large": the rest
        of the answer is of no use.
        """
        frames = [encode(message) for message in messages]
        outcomes: list[Outcome] = ["sent"] * len(messages)
        for place, (message, frame) in enumerate(zip(messages, frames, strict=True)):
            if len(frame) > MAX_FROM_WORKER_BYTES and not isinstance(message, Heartbeat):
                frames[place], outcomes[place] = encode(_refusal(message, len(frame))), "too_large"
        return outcomes if _send_now(self._socket, [proxy, *frames]) else ["gone"] * len(messages)

    def close(self) -> None:
        self._socket.close(linger=0)


class WorkerClient:
    """The proxy's end of the conversation with a worker. Messages wait (bounded) until the worker is there.

    `identity` tells the worker the owner of requests: unique in the cluster and never used again, or the worker would
    keep requests of an abandoned connection. `life` is the `life_id` of the worker: by now, another process may have
    the address. Every message tells whose it is.

    The connection reports connect and disconnect: the operating system closes a dead process's sockets at once, while
    the registry entry stays for seconds.
    """

    connected = False
    """Whether `opened` has seen the connection."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        address: str,
        identity: str,
        on_invalid: Callable[[], None] = lambda: None,
        life: str = "",
    ) -> None:
        """Connect to a worker. Invalid replies are discarded, with a call of `on_invalid` for each."""
        self._socket = context.socket(zmq.DEALER)
        _set_common_options(self._socket)
        self._socket.setsockopt(zmq.IDENTITY, identity.encode())
        self._socket.setsockopt(zmq.SNDHWM, QUEUE_REQUESTS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FROM_WORKER_BYTES + OVERHEAD_BYTES)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        secure_connect(self._socket, address)
        self.address = address
        self.life = life
        self._on_invalid = on_invalid
        self._arrived: deque[FromWorker] = deque()

    async def opened(self) -> bool:
        """Return once connected, or False after a refused try; never where no process answers."""
        self.connected = await self._next_event() == zmq.EVENT_HANDSHAKE_SUCCEEDED
        return self.connected

    async def lost(self) -> None:
        """Return once the connection is lost."""
        while await self._next_event() != zmq.EVENT_DISCONNECTED:
            pass

    async def _next_event(self) -> int:
        return int(parse_monitor_message(await self._monitor.recv_multipart())["event"])

    def send(self, message: ToWorker) -> None:
        """Send without waiting. Raises TriptychError: "unavailable" for a full queue, "item_too_large" above a cap."""
        data = encode(message)
        if len(data) > MAX_TO_WORKER_BYTES:
            raise _too_large("the request is too large for a worker", message, len(data), MAX_TO_WORKER_BYTES)
        if not _send_now(self._socket, [data], copy=False):
            message_text = f"the worker at {self.address} takes no messages ({QUEUE_REQUESTS} are waiting)"
            raise TriptychError("unavailable", message_text)

    async def receive(self) -> FromWorker:
        """Return the worker's next message about a request. Heartbeats and invalid messages are skipped.

        Raises TriptychError("unavailable") where another process answers.
        """
        while not self._arrived:
            frames = await self._socket.recv_multipart(copy=False)
            if self.life and (life := frames[0].get("Identity")) not in ("", self.life):
                raise TriptychError("unavailable", f"{life} answers at {self.address}, not {self.life}")
            for frame in frames:
                try:
                    message = decode_from_worker(frame.buffer)
                    if not isinstance(message, Heartbeat):
                        self._arrived.append(message)
                except TriptychError as error:
                    self._on_invalid()
                    log.warning("dropped a reply", worker=self.address, error=error.info.message)
        return self._arrived.popleft()

    def close(self, linger_ms: int = 0) -> None:
        """Close without waiting; the last messages have `linger_ms` to leave."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger_ms)


def _send_now(socket: zmq.asyncio.Socket, frames: list[bytes], *, copy: bool = True) -> bool:
    """Send a message; return False for a peer that is gone or takes no messages."""
    # A non-blocking send of an asyncio socket is over when it returns; its future only holds the outcome.
    sent = socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=copy)
    error = cast("asyncio.Future[Any]", sent).exception()
    if isinstance(error, zmq.ZMQError) and error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
        return False
    if error is not None:
        raise error
    return True


def _refusal(message: FromWorker, size_bytes: int) -> FromWorker:
    """Return the error in place of an answer that is too large for a proxy."""
    error = _too_large("the answer is too large for a proxy", message, size_bytes, MAX_FROM_WORKER_BYTES)
    log.warning("an answer is not sent", request=message.request_id, error=error.info.message)
    match message:
        case Encoded():
            return Encoded(message.request_id, message.input_id, message.attempt, error.info)
        case Prefilled():
            return Prefilled(message.request_id, message.attempt, error.info)
        case _:
            return Failed(message.request_id, error.info, message.attempt)


def _too_large(what: str, message: ToWorker | FromWorker, size_bytes: int, limit_bytes: int) -> TriptychError:
    excess = f"{size_bytes - limit_bytes} more than the {limit_bytes} allowed"
    text = f"{what}: its {type(message).__name__} message has {size_bytes} bytes, {excess}; ask for less"
    return TriptychError("item_too_large", text)


def _set_common_options(socket: zmq.asyncio.Socket) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    # Behind a full queue of received messages libzmq's heartbeats end the process (its issues 3937 and 4364). Running
    # requests, of which a proxy admits so many, bound what waits here.
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)  # a peer whose host vanished is noticed without TCP's minutes
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 6000)
