"""The receiving end of NIXL: reads tensors out of the senders' memory into its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

import zmq
import zmq.asyncio

from broker.cluster.curve import secure_listener
from broker.transports.base import ReceivedTensor
from broker.transports.nixl.agent import NixlAgent, NixlError
from broker.transports.nixl.reader import Reader
from broker.transports.nixl.receive_memory import ReceiveMemory
from broker.transports.nixl.wire import (
    MAX_MESSAGE_BYTES,
    VERSION,
    Goodbye,
    Greeting,
    ReadablePiece,
    Refusal,
    Taken,
    ToReceiver,
    ToSender,
    for_receiver,
    pack,
)
from common.telemetry import get_logger

FORGET_S: Final = 60.0
"""A sender that has said nothing for so long has to greet again; it is longer where pieces may take longer."""
_READY_TENSORS: Final = 2

log = get_logger()


class NixlReceiver:
    """See broker.transports.base.Receiver. Its tensors lie where `landing` has them."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        host: str,
        agent: NixlAgent,
        landing: ReceiveMemory,
        on_arrival: Callable[[], None],
        *,
        max_bytes: int,
        read_s: float,
    ) -> None:
        """Bind a free port for what is said beside the bytes. The agent is closed with this. A piece of a tensor that
        is not read within `read_s` is given up."""
        self._agent = agent
        self._landing = landing
        self._on_arrival = on_arrival
        self._max_bytes = max_bytes
        self._read_s = read_s
        self._forget_s = max(FORGET_S, 2 * read_s)  # a sender says nothing while it is read from
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        secure_listener(self._socket)
        self._socket.bind(f"tcp://{host}:*")
        self.address = str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT)).replace("tcp", landing.scheme, 1)
        self.num_invalid = self.num_unfinished = 0
        self._arrived: asyncio.Queue[ReceivedTensor] = asyncio.Queue(_READY_TENSORS)
        self._senders: dict[bytes, Reader] = {}
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._look_after())]

    def take(self) -> ReceivedTensor | None:
        return None if self._arrived.empty() else self._arrived.get_nowait()

    def close(self) -> None:
        for task in (*self._tasks, *(sender.task for sender in self._senders.values())):
            task.cancel()
        self._landing.close()
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
            await self._forget_the_silent()

    async def _look_after(self) -> None:
        """Also where nobody says anything, what has been given up is given back."""
        while True:
            await asyncio.sleep(FORGET_S / 4)
            self._agent.settle()
            await self._forget_the_silent()

    async def _take(self, identity: bytes, message: ToReceiver) -> None:
        sender = self._senders.get(identity)
        if isinstance(message, Goodbye):
            await self._forget(identity)
        elif isinstance(message, Greeting):
            await self._welcome(identity, message)
        elif isinstance(message, ReadablePiece) and sender is None:
            await self._say(identity, Taken(message.number, "greet first"))
        elif isinstance(message, ReadablePiece) and not message.ends <= message.size_bytes <= self._max_bytes:
            self.num_invalid += 1
            fault = f"{message.size_bytes} bytes, a piece up to {message.ends}"
            await self._say(identity, Taken(message.number, f"{fault}; at most {self._max_bytes} are taken"))
        elif sender is not None:
            sender.add(message)

    async def _welcome(self, identity: bytes, greeting: Greeting) -> None:
        """Get to know a sender, whose reader answers once it has read from it."""
        if greeting.version != VERSION:
            raise ValueError(f"a greeting of version {greeting.version}, this is {VERSION}")
        if identity not in self._senders:
            try:
                await self._landing.open()
            except NixlError as error:
                await self._say(identity, Refusal(str(error), for_good=True))
                return
            name = self._agent.meet(greeting.metadata)
            say, deliver, unfinished = partial(self._say, identity), self._deliver, self._count_unfinished
            self._senders[identity] = Reader(
                name, self._agent, self._landing, say, deliver, unfinished, self._max_bytes, self._read_s
            )
        self._senders[identity].add(greeting)

    async def _say(self, identity: bytes, message: ToSender) -> None:
        """Answer a sender; nothing happens where it has gone."""
        await self._socket.send_multipart([identity, pack(message)])

    def _count_unfinished(self) -> None:
        self.num_unfinished += 1

    async def _deliver(self, received: ReceivedTensor) -> None:
        await self._arrived.put(received)
        self._on_arrival()

    async def _forget_the_silent(self) -> None:
        for identity in [identity for identity, sender in self._senders.items() if sender.idle_s > self._forget_s]:
            await self._forget(identity)

    async def _forget(self, identity: bytes) -> None:
        sender = self._senders.pop(identity, None)
        if sender is not None:
            sender.task.cancel()
            await asyncio.wait([sender.task])
