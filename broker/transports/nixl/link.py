"""The sending end of NIXL, wherever the bytes lie: greets the receiver, and announces pieces in registered memory."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import ClassVar, Final

import zmq
import zmq.asyncio

from broker.cluster.curve import secure_client
from broker.transports.nixl.agent import Memory, NixlError
from broker.transports.nixl.receiver import FORGET_S
from broker.transports.nixl.wire import (
    MAX_MESSAGE_BYTES,
    PIECE_BYTES,
    WINDOW,
    Goodbye,
    Greeting,
    ReadablePiece,
    ReceiverGreeting,
    Refusal,
    Taken,
    ToReceiver,
    ToSender,
    for_sender,
    pack,
)
from common.errors import TriptychError
from common.messages import TensorHeader

GREETING_LASTS_S: Final = FORGET_S / 2


class NixlLink:
    """One tensor goes at a time, under `_turn`, and has a `_number` of its own."""

    scheme: ClassVar[str]

    def __init__(self, context: zmq.asyncio.Context, address: str) -> None:
        self._address = address
        self._turn = asyncio.Lock()
        self._greeted_s = float("-inf")
        self._refused = False
        self._max_bytes = 0
        self._number = 0
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 100)  # for the goodbye
        self._socket.setsockopt(zmq.IDENTITY, secrets.token_bytes(12))
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        secure_client(self._socket)
        self._socket.connect(address.replace(self.scheme, "tcp", 1))

    def close(self) -> None:
        """End the conversation."""
        if self._socket.closed:
            return
        if self._greeted_s > float("-inf"):
            with suppress(zmq.Again):  # it forgets us after a while in any case
                zmq.Socket.shadow(self._socket.underlying).send(pack(Goodbye()), zmq.NOBLOCK)
        self._socket.close()

    def _is_known(self) -> bool:
        """Whether the receiver has heard us lately; else it may have forgotten us."""
        known = time.monotonic() - self._greeted_s < GREETING_LASTS_S
        if known:
            self._greeted_s = time.monotonic()
        return known

    async def _greet(self, memory: Memory, nonce: bytes = b"", nonce_address: int = 0) -> None:
        """Make ourselves and our memory known, and wait until the receiver has read the nonce that lies in it.

        What it says to tensors and greetings that were given up is passed over. Raises NixlError where it refuses.
        """
        kind, device = memory.where
        await self._say(Greeting(memory.metadata, kind=kind, device=device, nonce_address=nonce_address))
        while not isinstance(answer := await self._hear(), ReceiverGreeting) or answer.nonce != nonce:
            if isinstance(answer, Refusal):
                self._refused = answer.for_good
                raise NixlError(answer.fault)
        self._max_bytes = answer.max_bytes
        self._greeted_s = time.monotonic()

    async def _send_pieces(
        self, header: TensorHeader, num_bytes: int, address: int, fill: Callable[[int, int, int], Awaitable[None]]
    ) -> None:
        """Announce a tensor, piece by piece, until all of them are taken.

        There is room for WINDOW pieces, or for all of it, at `address`. `fill(offset, start, n)` brings bytes of the
        tensor there, `n` from `start` on. Raises NixlError where the receiver could not get one.
        """
        if num_bytes > self._max_bytes:
            raise TriptychError("invalid_request", f"{num_bytes} bytes; the receiver takes {self._max_bytes} at most")
        num_pieces = max(1, -(-num_bytes // PIECE_BYTES))
        for index in range(num_pieces):
            if index >= WINDOW:
                await self._taken()
            start, offset = index * PIECE_BYTES, index % WINDOW * PIECE_BYTES
            size = min(PIECE_BYTES, num_bytes - start)
            await fill(offset, start, size)
            await self._say(ReadablePiece(self._number, header, num_bytes, start, size, address + offset))
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
