"""Tensors over NIXL (UCX): for hosts with RDMA between them, where it is installed.

    sender: copies pieces into registered memory  <-- reads --  receiver: into memory of its own

What is said beside the bytes goes over ZMQ, with the cluster's keys; the bytes themselves are as open as UCX has them.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar, Final

import numpy as np
import zmq
import zmq.asyncio

from broker.curve import secure_client
from broker.transports.base import took_none
from broker.transports.nixl_agent import Memory, NixlAgent, NixlError
from broker.transports.nixl_receiver import FORGET_S, SCHEME
from broker.transports.nixl_wire import (
    MAX_MESSAGE_BYTES,
    PIECE_BYTES,
    WINDOW,
    Goodbye,
    Greeting,
    Piece,
    Taken,
    ToReceiver,
    ToSender,
    for_sender,
    pack,
)
from broker.transports.passes import with_checksum
from common.errors import TriptychError
from common.messages import TensorHeader

GREETING_LASTS_S: Final = FORGET_S / 2


class NixlConnection:
    """See broker.transports.base.Connection. Returns when the receiver has all of a tensor; one goes at a time."""

    scheme: ClassVar[str] = SCHEME

    def __init__(self, context: zmq.asyncio.Context, agent: Callable[[], NixlAgent], address: str) -> None:
        """`agent` is that of the process, made when it is first needed."""
        self._agent = agent
        self._address = address
        self._turn = asyncio.Lock()
        self._memory: Memory | None = None
        self._greeted_s = float("-inf")
        self._max_bytes = 0
        self._number = 0
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 100)  # for the goodbye
        self._socket.setsockopt(zmq.IDENTITY, secrets.token_bytes(12))
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        secure_client(self._socket)
        self._socket.connect(address.replace(SCHEME, "tcp", 1))

    async def send(self, header: TensorHeader, data: memoryview, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s), self._turn:
                self._number += 1
                await self._greet()
                await self._send_pieces(await with_checksum(header, data), np.asarray(data.cast("B")))
        except TimeoutError as error:
            raise took_none(self._address, timeout_s) from error
        except (NixlError, ValueError) as error:
            raise TriptychError("unavailable", f"the receiver of tensors at {self._address}: {error}") from error

    def close(self) -> None:
        if self._socket.closed:
            return
        if self._greeted_s > float("-inf"):
            with suppress(zmq.Again):  # it forgets us after a while in any case
                zmq.Socket.shadow(self._socket.underlying).send(pack(Goodbye()), zmq.NOBLOCK)
        self._socket.close()
        if self._memory is not None:
            self._memory.deregister()
            self._memory = None

    async def _greet(self) -> None:
        """Make ourselves known, if the receiver does not know us or may have forgotten us."""
        if time.monotonic() - self._greeted_s < GREETING_LASTS_S:
            self._greeted_s = time.monotonic()
            return
        if self._memory is None:
            self._memory = Memory(self._agent(), np.empty(WINDOW * PIECE_BYTES, np.uint8))
        await self._say(Greeting(self._memory.metadata))
        while isinstance(answer := await self._hear(), Taken):  # of a tensor that was given up
            pass
        self._max_bytes = answer.max_bytes
        self._greeted_s = time.monotonic()

    async def _send_pieces(self, header: TensorHeader, source: np.ndarray) -> None:
        if source.nbytes > self._max_bytes:
            raise TriptychError(
                "invalid_request", f"{source.nbytes} bytes; the receiver takes {self._max_bytes} at most"
            )
        assert self._memory is not None
        num_pieces = max(1, -(-source.nbytes // PIECE_BYTES))
        for index in range(num_pieces):
            if index >= WINDOW:
                await self._taken()
            start = index * PIECE_BYTES
            piece = source[start : start + PIECE_BYTES]
            offset = index % WINDOW * PIECE_BYTES
            np.copyto(self._memory.array[offset : offset + piece.nbytes], piece)
            address = self._memory.address + offset
            await self._say(Piece(self._number, header, source.nbytes, start, piece.nbytes, address))
        for _ in range(min(num_pieces, WINDOW)):
            await self._taken()

    async def _taken(self) -> None:
        """Wait until the receiver has the oldest piece. Raises NixlError where it could not get it."""
        while not isinstance(answer := await self._hear(), Taken) or answer.number != self._number:
            pass
        if answer.fault:
            self._greeted_s = float("-inf")
            raise NixlError(answer.fault)

    async def _say(self, message: ToReceiver) -> None:
        await self._socket.send(pack(message))

    async def _hear(self) -> ToSender:
        return for_sender(await self._socket.recv())
