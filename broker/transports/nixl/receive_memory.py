"""Where the tensors of a NixlReceiver lie: memory of the host, registered for each, or the arena of its GPU."""

from __future__ import annotations

from typing import ClassVar, Final, Protocol

from broker.transports.base import ReceivedTensor
from broker.transports.cuda.runtime import CudaError, CudaRuntime
from broker.transports.nixl.agent import HostMemory, NixlAgent, NixlError
from broker.transports.nixl.arena import NixlArena
from broker.transports.nixl.registered_buffer import RegisteredBuffer
from common.messages import TensorHeader

HOST_SCHEME: Final = "nixl+tcp"
CUDA_SCHEME: Final = "nixl+cuda+tcp"
"""Senders know by it that a receiver has a GPU, and what lies on theirs can go there."""
RECEIVE_BYTES: Final = 128 * 2**20
"""Of the device, for each process that receives so: less than `cuda` takes of one that sends."""
MOST_BYTES: Final = RECEIVE_BYTES // 2
"""Of one tensor: one whose sender is stopped leaves the others room."""


class ReceiveMemory(Protocol):
    """Belongs to the loop."""

    scheme: ClassVar[str]
    has_checksums: ClassVar[bool]
    """Where they have none, senders have the last word on tensors."""

    async def open(self) -> None:
        """Raises NixlError where tensors have nowhere to lie, now and ever after."""

    async def room(self, num_bytes: int) -> RegisteredBuffer:
        """Room for a tensor, as soon as there is some. Raises NixlError."""

    async def read(self, room: RegisteredBuffer, num_bytes: int) -> bytes:
        """What lies in a room, brought to the host. Raises NixlError."""

    def hand_out(self, header: TensorHeader, room: RegisteredBuffer, num_bytes: int) -> ReceivedTensor:
        """A tensor that has been received; it takes over the room."""

    def close(self) -> None:
        """What has been handed out stays valid until it is released."""


class HostReceiveMemory:
    """New memory for each tensor."""

    scheme: ClassVar[str] = HOST_SCHEME
    has_checksums: ClassVar[bool] = True

    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent

    async def open(self) -> None: ...

    async def room(self, num_bytes: int) -> RegisteredBuffer:
        return _HostRoom(HostMemory(self._agent, max(1, num_bytes)))

    async def read(self, room: RegisteredBuffer, num_bytes: int) -> bytes:
        assert isinstance(room, _HostRoom)
        return room.memory.array[:num_bytes].tobytes()

    def hand_out(self, header: TensorHeader, room: RegisteredBuffer, num_bytes: int) -> ReceivedTensor:
        assert isinstance(room, _HostRoom)
        room.let_go()
        return ReceivedTensor(header, room.memory.array[:num_bytes].data)

    def close(self) -> None: ...


class _HostRoom(RegisteredBuffer):
    def __init__(self, memory: HostMemory) -> None:
        super().__init__(memory.where, memory.address, memory.deregister)
        self.memory = memory


class CudaReceiveMemory:
    """Rooms of one arena, which is made when the first sender greets."""

    scheme: ClassVar[str] = CUDA_SCHEME
    has_checksums: ClassVar[bool] = False

    def __init__(self, runtime: CudaRuntime, agent: NixlAgent) -> None:
        self._arena = NixlArena(runtime, agent, RECEIVE_BYTES)
        self.hand_out = self._arena.hand_out
        self.close = self._arena.close

    async def open(self) -> None:
        await self._arena.open()

    async def room(self, num_bytes: int) -> RegisteredBuffer:
        return await self._arena.lend(num_bytes)

    async def read(self, room: RegisteredBuffer, num_bytes: int) -> bytes:
        try:
            return await self._arena.read(room, num_bytes)
        except CudaError as error:
            raise NixlError(str(error)) from error
