"""Tensors between GPUs over NIXL (UCX): from the memory of one to that of the other, through no memory of ours between.

    sender: copies pieces into its arena, on the GPU  <-- reads --  receiver: into its arena, on its GPU

Each piece is copied on a stream of its own, which a thread waits for, before it is announced; an engine's stream waits
for nothing. The receiver proves that it reads the sender's memory before the first tensor, and where that fails another
transport is taken. No processor sees the bytes, so they have no checksum: see nixl_wire for what stands in for it.

It has not run on a GPU yet: tests run it between two processes over memory of the host (fake_cuda).
"""

from __future__ import annotations

import asyncio
import secrets
from typing import ClassVar, Final

import zmq.asyncio

from broker.transports.base import Unreachable, took_none
from broker.transports.cuda.runtime import CudaError, CudaRuntime
from broker.transports.nixl.agent import NixlAgent, NixlError
from broker.transports.nixl.arena import NixlArena
from broker.transports.nixl.link import NixlLink
from broker.transports.nixl.reader import NONCE_S
from broker.transports.nixl.receive_memory import CUDA_SCHEME, MOST_BYTES
from broker.transports.nixl.wire import NONCE_BYTES, PIECE_BYTES, WINDOW, Complete
from broker.transports.payload import DeviceBuffer
from common.messages import TensorHeader

SEND_BYTES: Final = 2 * WINDOW * PIECE_BYTES
"""Of the device, for each process that sends so: two large tensors at a time, or more smaller ones."""


class NixlCudaSender:
    """Makes the connections of one process, which share its arena."""

    scheme: ClassVar[str] = CUDA_SCHEME

    def __init__(self, context: zmq.asyncio.Context, runtime: CudaRuntime, agent: NixlAgent) -> None:
        self._context = context
        self._arena = NixlArena(runtime, agent, SEND_BYTES)

    def connect(self, address: str) -> NixlCudaConnection:
        """The connection to an address; it does not connect yet."""
        return NixlCudaConnection(self._context, self._arena, address)

    def close(self) -> None:
        """Give the arena back, once all connections are closed. Twice is fine."""
        self._arena.close()


class NixlCudaConnection(NixlLink):
    """See broker.transports.base.Connection: this one takes the memory of a GPU."""

    scheme: ClassVar[str] = CUDA_SCHEME

    def __init__(self, context: zmq.asyncio.Context, arena: NixlArena, address: str) -> None:
        super().__init__(context, address)
        self._arena = arena
        self._num_failed = 0

    async def send(self, header: TensorHeader, data: DeviceBuffer, timeout_s: float) -> None:
        failed_before = self._num_failed
        try:
            async with asyncio.timeout(timeout_s), self._turn:
                self._number += 1
                if not self._is_known():
                    if self._num_failed != failed_before:  # each would wait as long again
                        raise NixlError("the tensor before has found that it does not lead there")
                    await self._shake_hands()
                await self._send(header, data)
        except TimeoutError as error:
            raise took_none(self._address, timeout_s) from error
        except (NixlError, CudaError, ValueError) as error:
            raise Unreachable(f"no NIXL between GPUs with {self._address}: {error}") from error

    def carries(self, num_bytes: int) -> bool:
        """Whether a tensor is small enough for this way, and nothing has shown that it leads nowhere."""
        return num_bytes <= MOST_BYTES and not self._refused and not self._arena.has_failed

    async def _send(self, header: TensorHeader, data: DeviceBuffer) -> None:
        room = await self._arena.lend(min(data.nbytes, WINDOW * PIECE_BYTES))
        try:

            async def fill(offset: int, start: int, size: int) -> None:
                await self._arena.write(room, offset, DeviceBuffer(data.pointer + start, size, owner=data))

            await self._send_pieces(header, data.nbytes, room.address, fill)
            await self._say(Complete(self._number))
        finally:
            room.let_go()

    async def _shake_hands(self) -> None:
        """Raises NixlError where the receiver does not read our memory."""
        self._num_failed += 1  # until it has not
        memory, nonce = await self._arena.open(), secrets.token_bytes(NONCE_BYTES)
        room = await self._arena.lend(NONCE_BYTES)
        try:
            await self._arena.write(room, 0, nonce)
            async with asyncio.timeout(NONCE_S):
                await self._greet(memory, nonce, room.address)
            self._num_failed -= 1
        except TimeoutError as error:
            raise NixlError(f"it did not read from this GPU within {NONCE_S:g} s") from error
        finally:
            room.let_go()
