"""One sender, as the receiving end of NIXL has it: its pieces, read one after the other, and the tensor they make."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

from broker.transports.base import ReceivedTensor
from broker.transports.nixl.agent import NixlAgent, NixlError
from broker.transports.nixl.receive_memory import ReceiveMemory
from broker.transports.nixl.registered_buffer import HOST, RegisteredBuffer, Where
from broker.transports.nixl.wire import (
    NONCE_BYTES,
    WINDOW,
    Complete,
    Greeting,
    ReadablePiece,
    ReceiverGreeting,
    Refusal,
    Taken,
    ToSender,
)
from common.telemetry import get_logger

NONCE_S: Final = 5.0
"""Longest time for a sender's nonce; it takes another transport then."""
_MESSAGES: Final = WINDOW + 2
"""Beside the pieces of one tensor a greeting, and the word that they are complete."""

log = get_logger()


class Reader:
    """Reads what one sender announces, and answers it."""

    def __init__(
        self,
        name: str,
        agent: NixlAgent,
        landing: ReceiveMemory,
        say: Callable[[ToSender], Awaitable[None]],
        deliver: Callable[[ReceivedTensor], Awaitable[None]],
        on_unfinished: Callable[[], None],
        max_bytes: int,
        read_s: float,
    ) -> None:
        """`name` is that of its agent, which has been met; it is parted from when this ends. `on_unfinished` is called
        for each tensor of which something has come, but not all. `read_s` is the longest time for one piece: a sender
        that dies is noticed at once by most of UCX's ways, but not by all."""
        self._name = name
        self._agent = agent
        self._landing = landing
        self._say = say
        self._deliver = deliver
        self._on_unfinished = on_unfinished
        self._max_bytes = max_bytes
        self._read_s = read_s
        self._where: Where = HOST
        self._messages: asyncio.Queue[Greeting | ReadablePiece | Complete] = asyncio.Queue(_MESSAGES)
        self._newest = -1
        self._room: RegisteredBuffer | None = None
        self._last: ReadablePiece | None = None  # the one that has been read; the next one begins where it ends
        self._heard_s = time.monotonic()
        self.task = asyncio.create_task(self._run())
        """Runs until it is cancelled; nothing of the sender is left then."""

    @property
    def idle_s(self) -> float:
        return time.monotonic() - self._heard_s

    def add(self, message: Greeting | ReadablePiece | Complete) -> None:
        """The sender has said something. Raises ValueError where it does not keep to its window."""
        self._heard_s = time.monotonic()
        if isinstance(message, ReadablePiece) and message.number != self._newest:
            self._newest = message.number
            self._drop_pieces()
        try:
            self._messages.put_nowait(message)
        except asyncio.QueueFull:
            raise ValueError(f"{self._name} has sent more than {WINDOW} pieces at once") from None

    def _drop_pieces(self) -> None:
        """A sender has one tensor on its way at a time: whatever is still to be read of another one is given up."""
        for message in [self._messages.get_nowait() for _ in range(self._messages.qsize())]:
            if not isinstance(message, ReadablePiece):
                self._messages.put_nowait(message)

    async def _run(self) -> None:
        try:
            while True:
                message = await self._messages.get()
                if isinstance(message, ReadablePiece):
                    await self._say(Taken(message.number, await self._fault_of(message)))
                elif isinstance(message, Greeting):
                    await self._say(await self._answer_to(message))
                elif self._last is not None and message.number == self._last.number:
                    await self._hand_out(self._last)
        finally:
            self._let_go()
            self._agent.part(self._name)

    async def _answer_to(self, greeting: Greeting) -> ToSender:
        self._where = greeting.kind, greeting.device
        if greeting.nonce_address == 0:
            return ReceiverGreeting(self._max_bytes)
        try:
            async with asyncio.timeout(NONCE_S):
                return ReceiverGreeting(self._max_bytes, await self._nonce_at(greeting.nonce_address))
        except (NixlError, TimeoutError) as error:
            return Refusal(str(error) or f"its nonce was not read within {NONCE_S:g} s")

    async def _nonce_at(self, address: int) -> bytes:
        room = await self._landing.room(NONCE_BYTES)
        try:
            await self._agent.read(self._name, self._where, address, room, 0, NONCE_BYTES)
            return await self._landing.read(room, NONCE_BYTES)
        finally:
            room.let_go()

    async def _fault_of(self, piece: ReadablePiece) -> str:
        """Read a piece; why that was not possible, empty if it was."""
        try:
            async with asyncio.timeout(self._read_s):
                await self._read(piece)
            return ""
        except (NixlError, TimeoutError, ValueError) as error:
            fault = str(error) or f"not read within {self._read_s:g} s"
            log.warning("a tensor did not come to its end", sender=piece.header.sender, error=fault)
            if self._room is None and piece.start == 0:  # there was none for it
                self._on_unfinished()
            self._let_go()
            return fault

    async def _read(self, piece: ReadablePiece) -> None:
        if piece.start == 0:
            self._let_go()
            self._room = await self._landing.room(piece.size_bytes)
        elif self._last is None or (piece.number, piece.size_bytes) != (self._last.number, self._last.size_bytes):
            raise ValueError(f"tensor {piece.number} begins at byte {piece.start}")
        elif piece.start != self._last.ends:
            raise ValueError(f"tensor {piece.number} goes on at byte {piece.start}")
        assert self._room is not None
        if piece.num_bytes:
            where, address = self._where, piece.address
            await self._agent.read(self._name, where, address, self._room, piece.start, piece.num_bytes)
        self._last = piece
        if self._landing.has_checksums:
            await self._hand_out(piece)

    async def _hand_out(self, last: ReadablePiece) -> None:
        """Deliver the tensor, if this was its last piece."""
        if self._room is not None and last.ends == last.size_bytes:
            room, self._room, self._last = self._room, None, None
            await self._deliver(self._landing.hand_out(last.header, room, last.size_bytes))

    def _let_go(self) -> None:
        """The tensor of the moment is given up, if there is one."""
        room, self._room, self._last = self._room, None, None
        if room is not None:
            room.let_go()
            self._on_unfinished()
