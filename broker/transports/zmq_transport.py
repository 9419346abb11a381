"""Tensors over ZMQ (TCP): between hosts, and wherever nothing better is to be had.

    sender: one DEALER per receiver  -->  receiver: ROUTER

A message is two frames, header and raw bytes, which are copied nowhere on our side.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

import zmq
import zmq.asyncio

from broker.curve import OVERHEAD_BYTES, secure_client, secure_listener
from broker.transports.base import QUEUE_TENSORS, ReceivedTensor, took_none
from common.errors import TriptychError
from common.messages import TensorHeader, decode_tensor_header, encode
from common.telemetry import get_logger

log = get_logger()


class ZmqReceiver:
    """See broker.transports.base.Receiver."""

    def __init__(self, context: zmq.asyncio.Context, host: str, *, max_bytes: int) -> None:
        """Bind a free port. A sender of more than `max_bytes` at once is cut off before they are in memory."""
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, QUEUE_TENSORS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max(max_bytes, 64 * 2**10) + OVERHEAD_BYTES)
        secure_listener(self._socket)
        self._socket.bind(f"tcp://{host}:*")
        self.address = str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self.num_invalid = 0

    async def receive(self) -> ReceivedTensor:
        while True:
            frames = await self._socket.recv_multipart(copy=False)
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
        self._socket.close(linger=0)


class ZmqConnection:
    """See broker.transports.base.Connection. `data` must not change until the receipt has come: ZMQ reads it late."""

    scheme: ClassVar[str] = "tcp"

    def __init__(self, context: zmq.asyncio.Context, address: str) -> None:
        self._address = address
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, QUEUE_TENSORS)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing queues for a receiver that is not there
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        secure_client(self._socket)
        self._socket.connect(address)

    async def send(self, header: TensorHeader, data: memoryview, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._socket.send_multipart([encode(header), data], copy=False)
        except TimeoutError as error:
            raise took_none(self._address, timeout_s) from error

    def close(self) -> None:
        self._socket.close(linger=0)
