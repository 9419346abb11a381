"""Tensors over ZMQ (TCP): between hosts, and wherever nothing better is to be had.

    sender: one DEALER per receiver  -->  receiver: ROUTER

A message is two frames, header and raw bytes, which are copied nowhere on our side. The sockets are plain ones: what
can be done at once is done at once, and only what cannot waits on the loop. zmq.asyncio makes several objects per
message for this, which for small tensors costs more than the message does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import zmq
import zmq.asyncio

from broker.curve import OVERHEAD_BYTES, secure_client, secure_listener
from broker.transports.base import QUEUE_TENSORS, ReceivedTensor, took_none
from broker.transports.passes import with_checksum
from common.errors import TriptychError
from common.messages import TensorHeader, decode_tensor_header, encode
from common.telemetry import get_logger

log = get_logger()


class ZmqReceiver:
    """See broker.transports.base.Receiver."""

    def __init__(
        self, context: zmq.asyncio.Context, host: str, on_arrival: Callable[[], None], *, max_bytes: int
    ) -> None:
        """Bind a free port. A sender of more than `max_bytes` at once is cut off before they are in memory."""
        self._socket = _plain_socket(context, zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, QUEUE_TENSORS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max(max_bytes, 64 * 2**10) + OVERHEAD_BYTES)
        secure_listener(self._socket)
        self._socket.bind(f"tcp://{host}:*")
        self.address = str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self.num_invalid = 0
        self._wakeup = _Wakeup(self._socket, on_arrival)

    def take(self) -> ReceivedTensor | None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self._wakeup.set()
                return None
            try:
                if len(frames) != 3:
                    raise TriptychError("invalid_request", f"a tensor has 2 frames, not {len(frames) - 1}")
                header = decode_tensor_header(frames[1].buffer)
            except TriptychError as error:
                self.num_invalid += 1
                log.warning("dropped a message on the tensor socket", error=error.info.message)
                continue
            return ReceivedTensor(header, frames[2].buffer)  # keeps its frame alive

    def close(self) -> None:
        self._wakeup.cancel()
        self._socket.close(linger=0)


class ZmqConnection:
    """See broker.transports.base.Connection. `data` must not change until the receipt has come: ZMQ reads it late."""

    scheme: ClassVar[str] = "tcp"

    def __init__(self, context: zmq.asyncio.Context, address: str) -> None:
        self._address = address
        self._socket = _plain_socket(context, zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, QUEUE_TENSORS)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing queues for a receiver that is not there
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        secure_client(self._socket)
        self._socket.connect(address)
        self._turn = asyncio.Lock()
        self._room = asyncio.Event()
        self._wakeup = _Wakeup(self._socket, self._room.set)

    async def send(self, header: TensorHeader, data: memoryview, timeout_s: float) -> None:
        frames: list[bytes | memoryview] = [encode(await with_checksum(header, data)), data]
        if not self._turn.locked() and self._try_send(frames):
            return
        try:
            async with asyncio.timeout(timeout_s), self._turn:
                while not self._try_send(frames):
                    await self._next_change()
        except TimeoutError as error:
            raise took_none(self._address, timeout_s) from error

    def close(self) -> None:
        self._wakeup.cancel()
        self._socket.close(linger=0)
        self._room.set()

    def _try_send(self, frames: Sequence[bytes | memoryview]) -> bool:
        """Raises TriptychError("unavailable") where the connection has been closed."""
        if self._socket.closed:
            raise TriptychError("unavailable", f"the receiver of tensors at {self._address} has gone")
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    async def _next_change(self) -> None:
        """Wait until there may be room, or the connection is closed."""
        self._room.clear()
        if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:  # this has to be asked, or no wakeup follows
            self._wakeup.set()
            await self._room.wait()


class _Wakeup:
    """Calls `on_event` once, from the loop, when something has happened to a socket since one was last tried.

    A socket's descriptor (zmq_getsockopt(3), ZMQ_FD) stays readable until it is tried again, so it is watched only
    while somebody waits.
    """

    def __init__(self, socket: zmq.Socket[bytes], on_event: Callable[[], None]) -> None:
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._on_event = on_event
        self._loop = asyncio.get_running_loop()
        self._is_set = False

    def set(self) -> None:
        if not self._is_set:
            self._loop.add_reader(self._descriptor, self._fire)
            self._is_set = True

    def cancel(self) -> None:
        if self._is_set:
            self._loop.remove_reader(self._descriptor)
            self._is_set = False

    def _fire(self) -> None:
        self.cancel()
        self._on_event()


def _plain_socket(context: zmq.asyncio.Context, kind: int) -> zmq.Socket[bytes]:
    """A socket that does not know of the loop, but is closed with the context as the others are."""
    return cast("zmq.Socket[bytes]", context.socket(kind, socket_class=cast(Any, zmq.Socket)))
