"""The receiving end of NIXL: reads tensors out of the senders' memory into its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import numpy as np
import zmq
import zmq.asyncio

from broker.curve import secure_listener
from broker.transports.base import ReceivedTensor
from broker.transports.nixl_agent import Memory, NixlAgent, NixlError
from broker.transports.nixl_wire import (
    MAX_MESSAGE_BYTES,
    VERSION,
    WINDOW,
    Goodbye,
    Greeting,
    Piece,
    Taken,
    ToReceiver,
    ToSender,
    Welcome,
    for_receiver,
    pack,
)
from common.telemetry import get_logger

SCHEME: Final = "nixl+tcp"
READ_S: Final = 30.0
"""Longest time for one piece; a sender that dies is noticed at once by most of UCX's ways, but not by all."""
FORGET_S: Final = 60.0
"""A sender that has said nothing for so long has to greet again."""
_READY_TENSORS: Final = 2

log = get_logger()


class NixlReceiver:
    """See broker.transports.base.Receiver."""

    def __init__(
        self, context: zmq.asyncio.Context, host: str, on_arrival: Callable[[], None], *, max_bytes: int
    ) -> None:
        """Bind a free port for what is said beside the bytes. Raises ImportError where NIXL is not installed."""
        self._agent = NixlAgent(host)
        self._on_arrival = on_arrival
        self._max_bytes = max_bytes
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        secure_listener(self._socket)
        self._socket.bind(f"tcp://{host}:*")
        self.address = str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT)).replace("tcp", SCHEME, 1)
        self.num_invalid = 0
        self._arrived: asyncio.Queue[ReceivedTensor] = asyncio.Queue(_READY_TENSORS)
        self._senders: dict[bytes, _Sender] = {}
        self._task = asyncio.create_task(self._listen())

    def take(self) -> ReceivedTensor | None:
        return None if self._arrived.empty() else self._arrived.get_nowait()

    def close(self) -> None:
        self._task.cancel()
        for sender in self._senders.values():
            sender.task.cancel()
        self._agent.close()
        self._socket.close(linger=0)

    async def _listen(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                if len(frames) != 2:
                    raise ValueError(f"{len(frames) - 1} frames instead of one")
                await self._take(frames[0], for_receiver(frames[1]))
            except (ValueError, NixlError) as error:
                self.num_invalid += 1
                log.warning("dropped a message on the NIXL socket", error=str(error))
            for identity in [i for i, s in self._senders.items() if s.idle_s > FORGET_S]:
                await self._forget(identity)

    async def _take(self, identity: bytes, message: ToReceiver) -> None:
        sender = self._senders.get(identity)
        if isinstance(message, Goodbye):
            await self._forget(identity)
        elif isinstance(message, Greeting):
            if message.version != VERSION:
                raise ValueError(f"a greeting of version {message.version}, this is {VERSION}")
            if sender is None:
                name = self._agent.meet(message.metadata)
                sender = self._senders[identity] = _Sender(self, identity, name)
            sender.hear()
            await self.say(identity, Welcome(self._max_bytes))
        elif sender is None:
            await self.say(identity, Taken(message.number, "greet first"))
        elif message.size_bytes > self._max_bytes or message.start + message.num_bytes > message.size_bytes:
            self.num_invalid += 1
            fault = f"{message.size_bytes} bytes, a piece up to {message.start + message.num_bytes}"
            await self.say(identity, Taken(message.number, f"{fault}; at most {self._max_bytes} are taken"))
        else:
            sender.add(message)

    async def say(self, identity: bytes, message: ToSender) -> None:
        """Answer a sender; nothing happens where it has gone."""
        await self._socket.send_multipart([identity, pack(message)])

    async def deliver(self, received: ReceivedTensor) -> None:
        await self._arrived.put(received)
        self._on_arrival()

    @property
    def agent(self) -> NixlAgent:
        return self._agent

    async def _forget(self, identity: bytes) -> None:
        sender = self._senders.pop(identity, None)
        if sender is not None:
            sender.task.cancel()
            await asyncio.wait([sender.task])


class _Sender:
    """One sender: its pieces, read one after the other, and the tensor that they make."""

    def __init__(self, receiver: NixlReceiver, identity: bytes, name: str) -> None:
        self._receiver = receiver
        self._identity = identity
        self._name = name
        self._pieces: asyncio.Queue[Piece] = asyncio.Queue(WINDOW)
        self._number = -1
        self._memory: Memory | None = None
        self._heard_s = time.monotonic()
        self.task = asyncio.create_task(self._read_all())
        """Runs until it is cancelled; nothing of the sender is left then."""

    @property
    def idle_s(self) -> float:
        return time.monotonic() - self._heard_s

    def hear(self) -> None:
        """It has said something."""
        self._heard_s = time.monotonic()

    def add(self, piece: Piece) -> None:
        """Raises ValueError where the sender does not keep to its window."""
        self.hear()
        try:
            self._pieces.put_nowait(piece)
        except asyncio.QueueFull:
            raise ValueError(f"{self._name} has sent more than {WINDOW} pieces at once") from None

    async def _read_all(self) -> None:
        try:
            while True:
                piece = await self._pieces.get()
                await self._receiver.say(self._identity, Taken(piece.number, await self._fault_of(piece)))
        finally:
            self._let_go()
            with suppress(NixlError):  # it has gone before, or our own agent has
                self._receiver.agent.part(self._name)

    async def _fault_of(self, piece: Piece) -> str:
        """Read a piece; why that was not possible, empty if it was."""
        try:
            async with asyncio.timeout(READ_S):
                await self._read(piece)
            return ""
        except (NixlError, TimeoutError, ValueError) as error:
            fault = str(error) or f"not read within {READ_S:g} s"
            log.warning("a tensor did not come to its end", sender=piece.header.sender, error=fault)
            self._let_go()
            return fault

    async def _read(self, piece: Piece) -> None:
        if piece.number != self._number or piece.start == 0:
            self._let_go()
            if piece.start != 0:
                raise ValueError(f"tensor {piece.number} begins at byte {piece.start}")
            self._number = piece.number
            self._memory = Memory(self._receiver.agent, np.empty(max(1, piece.size_bytes), np.uint8))
        memory = self._memory
        if memory is None or piece.start + piece.num_bytes > memory.array.nbytes:
            raise ValueError(f"tensor {piece.number} has no byte {piece.start + piece.num_bytes}")
        if piece.num_bytes:
            await self._receiver.agent.read(self._name, piece.address, memory, piece.start, piece.num_bytes)
        if piece.start + piece.num_bytes == piece.size_bytes:
            self._let_go()
            await self._receiver.deliver(ReceivedTensor(piece.header, memory.array[: piece.size_bytes].data))

    def _let_go(self) -> None:
        """The tensor of the moment is complete, or given up."""
        memory, self._memory = self._memory, None
        if memory is not None:
            with suppress(NixlError):  # our own agent has been closed
                memory.deregister()
