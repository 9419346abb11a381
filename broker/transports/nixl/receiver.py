"""The receiving end of NIXL: reads tensors out of the senders' memory into its own, piece by piece."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import zmq
import zmq.asyncio

from broker.cluster.curve import secure_bind
from broker.transports.base import OnArrival
from broker.transports.nixl import wire
from broker.transports.nixl.agent import NixlAgent, NixlError, RegisteredBuffer
from broker.transports.nixl.memory import ReceiveMemory
from broker.transports.received import ReceivedTensor
from common.messages import encode
from common.telemetry import get_logger

_READY_TENSORS: Final = 2
_QUEUED_MESSAGES: Final = wire.WINDOW + 2
"""Of one sender: the pieces of one tensor, a greeting, and the word that the pieces are complete."""

log = get_logger()


class NixlReceiver:
    """See broker.transports.base.Receiver. Its tensors lie in `memory`."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        host: str,
        agent: NixlAgent,
        memory: ReceiveMemory,
        on_arrival: OnArrival,
        *,
        max_bytes: int,
        read_s: float,
    ) -> None:
        """Bind a free port for the messages beside the bytes; own `agent`, which `close` closes.

        Abandon a piece after `read_s` (seconds): not all of UCX's transports notice the death of a sender at once.
        """
        self.agent = agent
        self.memory = memory
        self.max_bytes = max_bytes
        self.read_s = read_s
        self._on_arrival = on_arrival
        self._forget_s = max(wire.FORGET_S, 2 * read_s)  # a sender is silent during a read
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
        self.address = secure_bind(self._socket, host).replace("tcp", memory.scheme, 1)
        self.num_invalid = self.num_unfinished = 0
        self._arrived: asyncio.Queue[ReceivedTensor] = asyncio.Queue(_READY_TENSORS)
        self._readers: dict[bytes, _Reader] = {}
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._clean_up())]

    def pop(self) -> ReceivedTensor | None:
        return None if self._arrived.empty() else self._arrived.get_nowait()

    def close(self) -> None:
        for task in (*self._tasks, *(reader.task for reader in self._readers.values())):
            task.cancel()
        self.memory.close()
        self.agent.close()
        self._socket.close(linger=0)

    async def send(self, identity: bytes, message: wire.ToSender) -> None:
        """Answer a sender; a sender that has gone is skipped."""
        await self._socket.send_multipart([identity, encode(message)])

    async def deliver(self, received: ReceivedTensor) -> None:
        """Queue a whole tensor, as soon as the queue has space."""
        await self._arrived.put(received)
        self._on_arrival(self)

    async def _listen(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                if len(frames) != 2:
                    raise ValueError(f"{len(frames) - 1} frames instead of one")
                await self._handle(frames[0], wire.for_receiver(frames[1]))
            except (ValueError, NixlError) as error:
                self.num_invalid += 1
                log.warning("dropped a message on the NIXL socket", error=str(error))

    async def _clean_up(self) -> None:
        """Forget silent senders, and release all that was abandoned."""
        while True:
            await asyncio.sleep(wire.FORGET_S / 4)
            self.agent.settle()
            for identity in [i for i, reader in self._readers.items() if reader.idle_s > self._forget_s]:
                await self._forget(identity)

    async def _handle(self, identity: bytes, message: wire.ToReceiver) -> None:
        reader = self._readers.get(identity)
        if isinstance(message, wire.Goodbye):
            await self._forget(identity)
        elif isinstance(message, wire.Greeting):
            await self._greet(identity, message)
        elif isinstance(message, wire.ReadablePiece) and reader is None:
            await self.send(identity, wire.Taken(message.number, "greet first"))
        elif isinstance(message, wire.ReadablePiece) and not message.ends <= message.size_bytes <= self.max_bytes:
            self.num_invalid += 1
            fault = f"{message.size_bytes} bytes, a piece up to {message.ends}"
            await self.send(identity, wire.Taken(message.number, f"{fault}; at most {self.max_bytes} are taken"))
        elif reader is not None:
            reader.add(message)

    async def _greet(self, identity: bytes, greeting: wire.Greeting) -> None:
        """Register a sender, whose reader answers after reading the nonce."""
        if greeting.version != wire.VERSION:
            raise ValueError(f"a greeting of version {greeting.version}, this is {wire.VERSION}")
        if identity not in self._readers:
            try:
                await self.memory.open()
            except NixlError as error:
                await self.send(identity, wire.Refusal(str(error), for_good=True))
                return
            self._readers[identity] = _Reader(self, identity, self.agent.add_peer(greeting.metadata))
        self._readers[identity].add(greeting)

    async def _forget(self, identity: bytes) -> None:
        reader = self._readers.pop(identity, None)
        if reader is not None:
            reader.task.cancel()
            await asyncio.wait([reader.task])


class _Reader:
    """Reads the announced pieces of one sender, one after the other, and answers."""

    def __init__(self, receiver: NixlReceiver, identity: bytes, name: str) -> None:
        """`name` is the sender's agent, which `add_peer` has registered; the end of this reader removes it."""
        self._receiver, self._agent, self._memory = receiver, receiver.agent, receiver.memory
        self._identity = identity
        self._name = name
        self._where: wire.Where = wire.HOST
        self._messages: asyncio.Queue[wire.Greeting | wire.ReadablePiece | wire.Complete] = asyncio.Queue(
            _QUEUED_MESSAGES
        )
        self._newest = -1
        self._buffer: RegisteredBuffer | None = None
        self._last: wire.ReadablePiece | None = None  # the last piece read; the next piece begins at its end
        self._heard_s = time.monotonic()
        self.task = asyncio.create_task(self._run())  # until cancelled; cleans up after the sender

    @property
    def idle_s(self) -> float:
        return time.monotonic() - self._heard_s

    def add(self, message: wire.Greeting | wire.ReadablePiece | wire.Complete) -> None:
        """Queue a message. Raises ValueError if the sender exceeds its window."""
        self._heard_s = time.monotonic()
        if isinstance(message, wire.ReadablePiece) and message.number != self._newest:
            self._newest = message.number
            # A sender sends one tensor at a time: pieces of an older tensor are abandoned.
            for queued in [self._messages.get_nowait() for _ in range(self._messages.qsize())]:
                if not isinstance(queued, wire.ReadablePiece):
                    self._messages.put_nowait(queued)
        try:
            self._messages.put_nowait(message)
        except asyncio.QueueFull:
            raise ValueError(f"{self._name} has sent more than {wire.WINDOW} pieces at once") from None

    async def _run(self) -> None:
        try:
            while True:
                message = await self._messages.get()
                if isinstance(message, wire.ReadablePiece):
                    fault = await self._fault_of(message)
                    await self._receiver.send(self._identity, wire.Taken(message.number, fault))
                elif isinstance(message, wire.Greeting):
                    await self._receiver.send(self._identity, await self._answer_to(message))
                elif self._last is not None and message.number == self._last.number:
                    await self._hand_out(self._last)
        finally:
            self._discard_tensor()
            self._agent.remove_peer(self._name)

    async def _answer_to(self, greeting: wire.Greeting) -> wire.ToSender:
        self._where = greeting.kind, greeting.device
        max_bytes = self._receiver.max_bytes
        if greeting.nonce_address == 0:
            return wire.ReceiverGreeting(max_bytes)
        try:
            async with asyncio.timeout(wire.NONCE_S):
                buffer = await self._memory.reserve(wire.NONCE_BYTES)
                try:
                    await self._agent.read(self._name, self._where, greeting.nonce_address, buffer, 0, wire.NONCE_BYTES)
                    return wire.ReceiverGreeting(max_bytes, await self._memory.read(buffer, wire.NONCE_BYTES))
                finally:
                    buffer.release()
        except (NixlError, TimeoutError) as error:
            return wire.Refusal(str(error) or f"its nonce was not read within {wire.NONCE_S:g} s")

    async def _fault_of(self, piece: wire.ReadablePiece) -> str:
        """Read a piece; return the reason of a failure, or an empty string."""
        try:
            async with asyncio.timeout(self._receiver.read_s):
                await self._read(piece)
            return ""
        except (NixlError, TimeoutError, ValueError) as error:
            fault = str(error) or f"not read within {self._receiver.read_s:g} s"
            log.warning("a tensor did not come to its end", sender=piece.header.sender, error=fault)
            if self._buffer is None and piece.start == 0:  # there was no memory for it
                self._receiver.num_unfinished += 1
            self._discard_tensor()
            return fault

    async def _read(self, piece: wire.ReadablePiece) -> None:
        if piece.start == 0:
            self._discard_tensor()
            self._buffer = await self._memory.reserve(piece.size_bytes)
        elif self._last is None or (piece.number, piece.size_bytes) != (self._last.number, self._last.size_bytes):
            raise ValueError(f"tensor {piece.number} begins at byte {piece.start}")
        elif piece.start != self._last.ends:
            raise ValueError(f"tensor {piece.number} goes on at byte {piece.start}")
        assert self._buffer is not None
        if piece.num_bytes:
            where, address = self._where, piece.address
            await self._agent.read(self._name, where, address, self._buffer, piece.start, piece.num_bytes)
        self._last = piece
        if self._memory.has_checksums:
            await self._hand_out(piece)

    async def _hand_out(self, last: wire.ReadablePiece) -> None:
        """Deliver the tensor, if `last` was its last piece."""
        if self._buffer is not None and last.ends == last.size_bytes:
            buffer, self._buffer, self._last = self._buffer, None, None
            await self._receiver.deliver(self._memory.hand_out(last.header, buffer, last.size_bytes))

    def _discard_tensor(self) -> None:
        """Abandon the current tensor, if there is any."""
        buffer, self._buffer, self._last = self._buffer, None, None
        if buffer is not None:
            buffer.release()
            self._receiver.num_unfinished += 1
