"""Tensors over ZMQ (TCP): between hosts, and wherever no better transport works.

    sender: one DEALER per receiver  -->  receiver: ROUTER

A message is two frames; the second frame has the raw bytes, without a copy on this side. A large tensor is several
messages (see zmq.wire). The sockets are plain, and only blocked calls wait on the loop: zmq.asyncio costs more than a
small tensor's message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar, Final, cast

import zmq
import zmq.asyncio

from broker.cluster.curve import OVERHEAD_BYTES, secure_bind, secure_connect
from broker.transports.base import QUEUE_TENSORS, OnArrival, sending
from broker.transports.checksums import TURN_BYTES, with_checksum
from broker.transports.received import ReceivedTensor
from broker.transports.zmq import wire
from broker.transports.zmq.assembly import Assembly
from common.errors import TriptychError
from common.hashing import Checksum
from common.messages import TensorHeader, encode
from common.telemetry import get_logger

log = get_logger()
_AT_ONCE, _MORE_AT_ONCE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
MESSAGE_COSTS_BYTES: Final = 64 * 2**10
"""Cost of a message in a turn beside its bytes: an empty message takes time, too."""


class ZmqReceiver:
    """See broker.transports.base.Receiver."""

    def __init__(
        self, context: zmq.asyncio.Context, host: str, on_arrival: OnArrival, *, max_bytes: int, stale_s: float
    ) -> None:
        """Bind a free port. Discard unfinished tensors after `stale_s` without more.

        Senders of messages above the size limit are cut off before the message is in memory.
        """
        self._socket = _plain_socket(context, zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, QUEUE_TENSORS)
        self._socket.setsockopt(
            zmq.MAXMSGSIZE, max(min(max_bytes, wire.WHOLE_BYTES), wire.MAX_HEAD_BYTES) + OVERHEAD_BYTES
        )
        self.address = secure_bind(self._socket, host)
        self.num_invalid = 0
        self._loop = asyncio.get_running_loop()
        self._on_arrival = on_arrival
        self._ready: ReceivedTensor | None = None
        self._wakeup = _Wakeup(self._socket, self._go_on)
        self._drained = True  # nothing was in the socket when it was last asked
        self._next_turn: asyncio.Handle | None = None
        self._assembly = Assembly(max_bytes, stale_s, lambda: self._drained)

    @property
    def num_unfinished(self) -> int:
        return self._assembly.num_unfinished

    def pop(self) -> ReceivedTensor | None:
        received, self._ready = self._ready or self._next(), None
        return received

    def close(self) -> None:
        self._wakeup.cancel()
        self._end_turn()
        self._assembly.close()
        self._ready = None
        self._socket.close(linger=0)

    def _next(self) -> ReceivedTensor | None:
        """Return the next tensor; without a tensor yet, call `_go_on` once one may have come."""
        turn_bytes = 0
        while turn_bytes < TURN_BYTES:
            try:
                sender = self._socket.recv(_AT_ONCE)
            except zmq.Again:
                self._drained = True
                self._wakeup.set()
                return None
            self._drained = False
            turn_bytes += MESSAGE_COSTS_BYTES
            try:
                head, data = self._receive_frames()
                turn_bytes += data.nbytes
                received = self._assembly.add(sender, wire.decode_head(head), data)
            except ValueError as error:
                self.num_invalid += 1
                self._assembly.discard(sender)
                log.warning("dropped a message on the tensor socket", error=str(error))
                continue
            if received is not None:
                return received
        self._wakeup.cancel()
        self._end_turn()
        self._next_turn = self._loop.call_soon(self._go_on)
        return None

    def _receive_frames(self) -> tuple[bytes, memoryview]:
        """Return the two frames after the sender's identity, faster than `recv_multipart`. Raises ValueError."""
        head = self._socket.recv()  # a message has come with all its frames
        if not self._socket.getsockopt(zmq.RCVMORE):
            raise ValueError("a message of one frame, not of two")
        frame = self._socket.recv(copy=False)
        if frame.more:
            while self._socket.recv(copy=False).more:
                pass
            raise ValueError("a message of more than two frames")
        return head, frame.buffer  # which keeps the frame

    def _end_turn(self) -> None:
        """Cancel the scheduled next turn: at most one is pending, for all callers."""
        if self._next_turn is not None:
            self._next_turn.cancel()
            self._next_turn = None

    def _go_on(self) -> None:
        """Assemble incoming pieces until a tensor is complete; take no further message before."""
        if self._ready is not None:
            self._wakeup.cancel()
        elif not self._socket.closed and (received := self._next()) is not None:
            self._ready = received
            self._on_arrival(self)


class ZmqConnection:
    """ZMQ's broker.transports.base.Connection. `data` must not change until the receipt has come: ZMQ reads late."""

    scheme: ClassVar[str] = "tcp"

    def __init__(self, context: zmq.asyncio.Context, address: str) -> None:
        self._address = address
        self._socket = _plain_socket(context, zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, QUEUE_TENSORS)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing queues for a receiver that is not there
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        secure_connect(self._socket, address)
        self._turn = asyncio.Lock()
        self._writable = asyncio.Event()
        self._wakeup = _Wakeup(self._socket, self._set_writable)

    async def send(self, header: TensorHeader, data: memoryview, timeout_s: float) -> None:
        divided = wire.is_divided(header, data.nbytes)
        if not divided:
            header = await with_checksum(header, data)
            if not self._turn.locked() and self._try_send(header, data):
                return
        async with sending(self._address, timeout_s), self._turn:
            await (self._send_pieces if divided else self._send)(header, data)

    def close(self) -> None:
        self._set_writable()
        self._socket.close(linger=0)

    async def _send_pieces(self, header: TensorHeader, data: memoryview) -> None:
        """Send the pieces, each hashed just before: ZMQ's thread finds the bytes in the processor's cache."""
        digest = Checksum()
        for start in range(0, data.nbytes, wire.PIECE_BYTES):
            if start and start % TURN_BYTES == 0:
                await asyncio.sleep(0)
            piece = data[start : start + wire.PIECE_BYTES]
            digest.update(piece)
            is_last = start + wire.PIECE_BYTES >= data.nbytes
            head = wire.Next(start, digest.intdigest() if is_last else 0) if start else wire.First(header, data.nbytes)
            await self._send(head, piece)

    async def _send(self, head: wire.Head, data: memoryview) -> None:
        while not self._try_send(head, data):
            await self._next_change()

    def _try_send(self, head: wire.Head, data: memoryview) -> bool:
        """Raises TriptychError("unavailable") where the connection has been closed."""
        if self._socket.closed:
            raise TriptychError("unavailable", f"the receiver of tensors at {self._address} has gone")
        try:
            self._socket.send(encode(head), _MORE_AT_ONCE)  # twice as fast as `send_multipart`
            self._socket.send(data, _AT_ONCE, copy=False)
        except zmq.Again:
            return False
        return True

    def _set_writable(self) -> None:
        self._wakeup.cancel()
        self._writable.set()

    async def _next_change(self) -> None:
        """Wait until the socket may have space, or the connection is closed."""
        self._writable.clear()
        if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:  # this has to be asked, or no wakeup follows
            self._wakeup.set()
            await self._writable.wait()


class _Wakeup:
    """Calls `on_event`, from the loop, after an event on a socket since the last try.

    The descriptor (zmq_getsockopt(3), ZMQ_FD) stays readable until the next try: `on_event` has to try, or to cancel.
    """

    def __init__(self, socket: zmq.Socket[bytes], on_event: Callable[[], None]) -> None:
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._on_event = on_event
        self._loop = asyncio.get_running_loop()
        self.is_set = False

    def set(self) -> None:
        if not self.is_set:
            self._loop.add_reader(self._descriptor, self._on_event)
            self.is_set = True

    def cancel(self) -> None:
        if self.is_set:
            self._loop.remove_reader(self._descriptor)
            self.is_set = False


def _plain_socket(context: zmq.asyncio.Context, kind: int) -> zmq.Socket[bytes]:
    """Return a socket unknown to the loop, but closed with the context like all others."""
    return cast("zmq.Socket[bytes]", context.socket(kind, socket_class=cast(Any, zmq.Socket)))
