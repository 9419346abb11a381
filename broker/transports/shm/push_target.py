"""The receiver's side of an early send: memory shared by the sender before its tensor is computed. See push_buffer.

The tensor stays there; the receiver hashes the pieces behind the sender. Unwanted memory is freed at once, while the
sender may still write.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

import msgspec
import numpy as np

from broker.transports.base import ReceivedTensor
from broker.transports.shm.segment import Bytes
from common.hashing import Checksum
from common.messages import TensorHeader


class PushedTensor(ReceivedTensor, frozen=True, eq=False):
    """A tensor in `memory` of the receiver's own; `release` returns no memory to the sender."""

    memory: Bytes = msgspec.field(default_factory=lambda: np.zeros(0, np.uint8))
    read_checksum: int = 0
    """Of the bytes as read here."""

    async def verify(self) -> str | None:
        return self.verified()

    def verified(self) -> str | None:
        """As `verify`, at once: the pass over the bytes has been made."""
        return self.fault if self.fault is not None else self._fault_of(self.read_checksum)


class PushTarget:
    """Memory for one pushed tensor. Every method but `touch` is for the loop."""

    def __init__(self, header: TensorHeader, memory: Bytes | None) -> None:
        """Hold `memory`; None stands for discarded memory."""
        self.header = header
        self.on_complete: Callable[[PushedTensor], bool] = _keep_none
        """Called with the whole tensor; after False the tensor is received in the ordinary way."""
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


def _keep_none(received: PushedTensor) -> bool:
    return False
