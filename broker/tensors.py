"""Tensors from one process to another over ZMQ: a header and the raw bytes, copied nowhere on our side.

    sender: TensorSender (one DEALER per receiver)  -->  receiver: TensorReceiver (ROUTER)

dtypes are names and the payload is bytes, so bf16 travels as it is. Nothing here knows torch.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import Final

import zmq
import zmq.asyncio

from common.errors import TriptychError
from common.messages import Offer, TensorHeader, decode_tensor_header, encode
from common.telemetry import get_logger

ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int32": 4, "uint8": 1}
"""Bytes per element of every dtype that may travel."""
QUEUE_TENSORS: Final = 64
"""Tensors that may wait in the memory of one connection."""

log = get_logger()


@dataclass(frozen=True)
class ReceivedTensor:
    """`data` holds `header.size_bytes` bytes that stay valid as long as it is referenced.

    `fault` says why header and bytes do not agree with each other; None where they do.
    """

    header: TensorHeader
    data: memoryview
    fault: str | None


def payload_fault(message: TensorHeader | Offer, num_bytes: int) -> str | None:
    """Why what a message says of a tensor does not fit `num_bytes` of it, or itself; None if it does."""
    item_bytes = ITEM_BYTES.get(message.dtype)
    if item_bytes is None:
        return f"dtype {message.dtype!r} is none of {', '.join(ITEM_BYTES)}"
    if min(message.shape, default=0) < 0:
        return f"shape {message.shape} has a negative size"
    expected = math.prod(message.shape) * item_bytes
    if not expected == message.size_bytes == num_bytes:
        shape = f"shape {message.shape} of {message.dtype} is {expected} bytes"
        return f"{shape}, the message says {message.size_bytes}, there are {num_bytes}"
    return None


class TensorReceiver:
    """Takes tensors from any number of senders."""

    def __init__(self, context: zmq.asyncio.Context, host: str = "127.0.0.1", *, max_bytes: int) -> None:
        """Bind a free port. A sender of more than `max_bytes` at once is cut off before they are in memory."""
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, QUEUE_TENSORS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max(max_bytes, 64 * 2**10))
        self._socket.bind(f"tcp://{host}:*")
        self.address = str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self.num_invalid = 0

    async def receive(self) -> ReceivedTensor:
        """The next message with a valid header; anything else is counted and dropped."""
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
            data = frames[2].buffer  # keeps its frame alive
            return ReceivedTensor(header, data, payload_fault(header, data.nbytes))

    def close(self) -> None:
        self._socket.close(linger=0)


class TensorSender:
    """Sends tensors to any number of receivers, each over its own connection."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self._context = context
        self._sockets: dict[str, zmq.asyncio.Socket] = {}

    async def send(self, address: str, header: TensorHeader, data: memoryview, timeout_s: float) -> None:
        """Hand one tensor to the connection to `address`; `data` must not change until the receipt has come.

        Raises TriptychError("unavailable") where there is no connection, or no room in it, within `timeout_s`.
        """
        socket = self._sockets.get(address)
        if socket is None:
            socket = self._sockets[address] = self._connect(address)
        try:
            async with asyncio.timeout(timeout_s):
                await socket.send_multipart([encode(header), data], copy=False)
        except TimeoutError as error:
            message = f"the receiver of tensors at {address} took none within {timeout_s:g} s"
            raise TriptychError("unavailable", message) from error

    def keep_only(self, addresses: set[str]) -> None:
        """Close the connections to all other receivers: they are gone."""
        for address in self._sockets.keys() - addresses:
            self._sockets.pop(address).close(linger=0)

    def close(self) -> None:
        self.keep_only(set())

    def _connect(self, address: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, QUEUE_TENSORS)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing queues for a receiver that is not there
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.connect(address)
        return socket
