"""Arrivals at a receiver: tensors, and memory shared by a sender before its tensor is computed (see shm.push_buffer).

A pushed tensor stays in that memory; the receiver hashes the pieces behind the sender. Unwanted memory is freed while
the sender may still write.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from broker.transports import checksums
from broker.transports.payload import ChunkedBytes, DeviceBuffer, Payload
from common.hashing import Checksum
from common.messages import TensorHeader

Bytes = npt.NDArray[np.uint8]


class ReceivedTensor(msgspec.Struct, frozen=True, eq=False):
    """A tensor's header and bytes. `data` may be read-only, at any address, in pieces, or on a GPU.

    `fault` says why the header contradicts itself or the number of bytes; None if consistent. Damage shows only after a
    pass over the bytes: by `verify` or by `copy_into`. For pieces, arrival includes that pass.
    """

    header: TensorHeader
    data: Payload | ChunkedBytes
    fault: str | None = None
    _release: Callable[[], None] | None = None

    async def verify(self) -> str | None:
        """Return the fault of the bytes; None for undamaged bytes and for a GPU's memory."""
        if self.fault is not None or isinstance(self.data, DeviceBuffer):
            return self.fault
        if isinstance(self.data, ChunkedBytes):
            return self._fault_of(self.data.checksum)
        return self._fault_of(await checksums.checksum_of(self.data))

    async def copy_into(self, target: memoryview) -> str | None:
        """Copy the bytes, as many as `target` has, and check the copy; None for an undamaged copy.

        Otherwise return the fault; then nobody may read `target`. Raises TypeError for the memory of a GPU.
        """
        if self.fault is not None:
            return self.fault
        if isinstance(self.data, DeviceBuffer):
            raise TypeError("memory of a GPU is copied by CUDA")
        if isinstance(self.data, memoryview):
            return self._fault_of(await checksums.copy(self.data, target, hashed=target))
        fault = await self.verify()
        if fault is None:
            await checksums.join(self.data, target)
        return fault

    def _fault_of(self, checksum: int) -> str | None:
        if checksum == self.header.checksum:
            return None
        return "the checksum is not the one of these bytes: they were damaged on the way"

    def release(self) -> None:
        """Release the memory, after the last use of `data`. Safe from any thread, and idempotent.

        An array made from `data` keeps the memory until its end. Garbage collection has the same effect, later.
        """
        try:
            self.data.release()
        except BufferError:  # an array looks at it
            return
        if self._release is not None:
            self._release()


class PushedTensor(ReceivedTensor, frozen=True, eq=False):
    """A tensor in `memory` of the receiver's own; `release` returns no memory to the sender."""

    memory: Bytes = msgspec.field(default_factory=lambda: np.zeros(0, np.uint8))
    read_checksum: int = 0
    """Of the bytes as read here."""

    async def verify(self) -> str | None:
        """Return the fault of the bytes at once: the pass over them has been made."""
        return self.fault if self.fault is not None else self._fault_of(self.read_checksum)


class PushTarget:
    """Memory for one pushed tensor. Every method but `touch` is for the loop."""

    def __init__(self, header: TensorHeader, memory: Bytes | None) -> None:
        """Hold `memory`; None stands for discarded memory."""
        self.header = header
        self.memory = memory
        """None once the memory was discarded."""
        self._digest = Checksum()
        self._num_read = 0

    def touch(self) -> None:
        """Let the system find pages; any thread. Only reads: the tensor may be arriving."""
        if (memory := self.memory) is not None:
            memory[:: mmap.PAGESIZE].max(initial=0)  # by NumPy, which lets other threads run meanwhile

    def discard(self) -> None:
        """Free the memory of an unwanted tensor. Idempotent."""
        self.memory = None

    def read_to(self, end: int) -> None:
        """Hash the first `end` bytes, which the sender has written. Raises ValueError for an impossible `end`."""
        if not self._num_read <= end <= self.header.size_bytes:
            raise ValueError(f"{end} bytes of {self.header.size_bytes} are written, after {self._num_read}")
        if self.memory is not None:
            self._digest.update(self.memory[self._num_read : end].data)
        self._num_read = end

    def complete(self, header: TensorHeader) -> PushedTensor | None:
        """Return the tensor, with the checksum in `header`; None if its memory was discarded.

        Raises ValueError for another tensor than announced.
        """
        if msgspec.structs.replace(header, checksum=self.header.checksum) != self.header:
            raise ValueError(f"{header} in memory given for {self.header}")
        self.read_to(header.size_bytes)
        memory, self.memory = self.memory, None
        if memory is None:
            return None
        return PushedTensor(header, memory.data, memory=memory, read_checksum=self._digest.intdigest())


Received: TypeAlias = ReceivedTensor | PushTarget
