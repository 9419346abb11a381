"""The sending ends of NIXL (UCX): greet the receiver, and announce pieces that lie in registered memory.

    host    sender: copies pieces into registered memory   <-- reads --  receiver: into memory of its own
    GPU     sender: copies pieces into its arena, on GPU   <-- reads --  receiver: into its arena, on its GPU

Announcements go over ZMQ, with the cluster's keys; the bytes themselves are as open as UCX has them.

Between GPUs, a thread waits for the copy of each piece, on a stream of its own, before the announcement. The receiver
proves that it reads the sender's memory before the first tensor; on failure another transport is chosen. No processor
sees the bytes, so they have no checksum: `wire` says why that is safe. This path has not run on a GPU yet: tests run it
between two processes over host memory (fake_cuda).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import ClassVar, Final

import numpy as np
import zmq
import zmq.asyncio

from broker.cluster.curve import secure_connect
from broker.transports.base import Unreachable, sending
from broker.transports.checksums import with_checksum
from broker.transports.nixl import wire
from broker.transports.nixl.agent import HostMemory, NixlAgent, NixlError, RegisteredMemory
from broker.transports.nixl.memory import CUDA_SCHEME, HOST_SCHEME, MAX_TENSOR_BYTES, NixlArena
from broker.transports.payload import DeviceBuffer
from common.errors import TriptychError
from common.messages import TensorHeader, encode

GREETING_LASTS_S: Final = wire.FORGET_S / 2
SEND_BYTES: Final = 2 * wire.WINDOW * wire.PIECE_BYTES
"""Of the device, for each process that sends from a GPU: two large tensors at a time, or more smaller tensors."""


class NixlLink(ABC):
    """The conversation with one receiver. One tensor is sent at a time, under `_turn`, as number `_number`."""

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
        self._socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
        secure_connect(self._socket, address.replace(self.scheme, "tcp", 1))

    def close(self) -> None:
        """End the conversation. Idempotent."""
        if self._socket.closed:
            return
        if self._greeted_s > float("-inf"):
            with suppress(zmq.Again):  # the receiver forgets this sender after a while in any case
                zmq.Socket.shadow(self._socket.underlying).send(encode(wire.Goodbye()), zmq.NOBLOCK)
        self._socket.close()

    def _is_known(self) -> bool:
        """Whether the receiver has heard from this sender lately; else the receiver may have forgotten it."""
        known = time.monotonic() - self._greeted_s < GREETING_LASTS_S
        if known:
            self._greeted_s = time.monotonic()
        return known

    async def _greet(self, memory: RegisteredMemory, nonce: bytes = b"", nonce_address: int = 0) -> None:
        """Make `memory` known; wait until the receiver has read the nonce in it. Raises NixlError on a refusal."""
        kind, device = memory.where
        await self._send_message(wire.Greeting(memory.metadata, kind=kind, device=device, nonce_address=nonce_address))
        # Answers to abandoned tensors and greetings are skipped.
        while not isinstance(answer := await self._receive(), wire.ReceiverGreeting) or answer.nonce != nonce:
            if isinstance(answer, wire.Refusal):
                self._refused = answer.for_good
                raise NixlError(answer.fault)
        self._max_bytes = answer.max_bytes
        self._greeted_s = time.monotonic()

    async def _send_pieces(
        self, header: TensorHeader, num_bytes: int, address: int, fill: Callable[[int, int, int], Awaitable[None]]
    ) -> None:
        """Announce a tensor, piece by piece, until the receiver has read all pieces.

        `address` has memory for WINDOW pieces, or for the whole tensor. `fill(offset, start, n)` copies `n` bytes of
        the tensor there, from `start` on. Raises NixlError if the receiver could not read a piece.
        """
        if num_bytes > self._max_bytes:
            raise TriptychError("invalid_request", f"{num_bytes} bytes; the receiver takes {self._max_bytes} at most")
        num_pieces = max(1, -(-num_bytes // wire.PIECE_BYTES))
        for index in range(num_pieces):
            if index >= wire.WINDOW:
                await self._piece_read()
            start, offset = index * wire.PIECE_BYTES, index % wire.WINDOW * wire.PIECE_BYTES
            size = min(wire.PIECE_BYTES, num_bytes - start)
            await fill(offset, start, size)
            await self._send_message(wire.ReadablePiece(self._number, header, num_bytes, start, size, address + offset))
        for _ in range(min(num_pieces, wire.WINDOW)):
            await self._piece_read()

    async def _piece_read(self) -> None:
        """Wait until the receiver has read the oldest piece. Raises NixlError if that failed."""
        while not isinstance(answer := await self._receive(), wire.Taken) or answer.number != self._number:
            pass
        if answer.fault:
            self._greeted_s = float("-inf")
            raise NixlError(answer.fault)

    async def _send_message(self, message: wire.ToReceiver) -> None:
        await self._socket.send(encode(message))

    async def _receive(self) -> wire.ToSender:
        return wire.for_sender(await self._socket.recv())


class NixlConnection(NixlLink):
    """Sends host memory; see broker.transports.base.Connection. Returns when the receiver has the whole tensor."""

    scheme: ClassVar[str] = HOST_SCHEME

    def __init__(self, context: zmq.asyncio.Context, agent: NixlAgent, address: str) -> None:
        """Use the process's `agent`."""
        super().__init__(context, address)
        self._agent = agent
        self._memory: HostMemory | None = None

    async def send(self, header: TensorHeader, data: memoryview, timeout_s: float) -> None:
        async with sending(self._address, timeout_s, NixlError, ValueError), self._turn:
            self._number += 1
            if self._memory is None:
                self._memory = HostMemory(self._agent, wire.WINDOW * wire.PIECE_BYTES)
            if not self._is_known():
                await self._greet(self._memory)
            window, source = self._memory.array, np.asarray(data.cast("B"))

            async def fill(offset: int, start: int, size: int) -> None:
                np.copyto(window[offset : offset + size], source[start : start + size])

            await self._send_pieces(await with_checksum(header, data), data.nbytes, self._memory.address, fill)

    def close(self) -> None:
        super().close()
        if self._memory is not None:
            self._memory.deregister()
            self._memory = None


class NixlCudaConnection(NixlLink):
    """Sends the memory of a GPU, by the arena of its process; see broker.transports.base.Connection."""

    scheme: ClassVar[str] = CUDA_SCHEME

    def __init__(self, context: zmq.asyncio.Context, arena: NixlArena, address: str) -> None:
        super().__init__(context, address)
        self._arena = arena
        self._num_failed = 0

    async def send(self, header: TensorHeader, data: DeviceBuffer, timeout_s: float) -> None:
        failed_before = self._num_failed
        try:
            async with sending(self._address, timeout_s), self._turn:
                self._number += 1
                if not self._is_known():
                    if self._num_failed != failed_before:  # each waiting send would wait as long again
                        raise NixlError("the tensor before has found that it does not lead there")
                    await self._shake_hands()
                await self._send_tensor(header, data)
        except (NixlError, ValueError) as error:
            raise Unreachable(f"no NIXL between GPUs with {self._address}: {error}") from error

    def carries(self, num_bytes: int) -> bool:
        """Return whether a tensor of `num_bytes` may go this way: small enough, and no failure for good."""
        return num_bytes <= MAX_TENSOR_BYTES and not self._refused and not self._arena.has_failed

    async def _send_tensor(self, header: TensorHeader, data: DeviceBuffer) -> None:
        buffer = await self._arena.reserve(min(data.nbytes, wire.WINDOW * wire.PIECE_BYTES))
        try:

            async def fill(offset: int, start: int, size: int) -> None:
                await self._arena.write(buffer, offset, DeviceBuffer(data.pointer + start, size, owner=data))

            await self._send_pieces(header, data.nbytes, buffer.address, fill)
            await self._send_message(wire.Complete(self._number))
        finally:
            buffer.release()

    async def _shake_hands(self) -> None:
        """Raise NixlError if the receiver does not read this GPU's memory."""
        self._num_failed += 1  # until the nonce has come back
        memory, nonce = await self._arena.open(), secrets.token_bytes(wire.NONCE_BYTES)
        buffer = await self._arena.reserve(wire.NONCE_BYTES)
        try:
            await self._arena.write(buffer, 0, nonce)
            async with asyncio.timeout(wire.NONCE_S):
                await self._greet(memory, nonce, buffer.address)
            self._num_failed -= 1
        except TimeoutError as error:
            raise NixlError(f"it did not read from this GPU within {wire.NONCE_S:g} s") from error
        finally:
            buffer.release()
