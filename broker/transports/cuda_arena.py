"""The memory of this process's GPU that other processes may read: one allocation, one handle, for all receivers.

It is allocated with the first connection and lives as long as the sender, so that no receiver ever looks at memory that
has been given to somebody else. Copies into it go over a stream of its own, which no step of an engine waits for.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Final

import numpy as np

from broker.transports.arena import Arena
from broker.transports.cuda_runtime import CudaError, CudaRuntime
from broker.transports.payload import DeviceBuffer

ARENA_BYTES: Final = 128 * 2**20
"""Of the device, for each process that sends; common.gpu_memory leaves it out of what pools share."""


class ExportArena:
    """Rooms for tensors on their way. Belongs to the loop, but for the methods that block."""

    def __init__(self, runtime: CudaRuntime, size_bytes: int = ARENA_BYTES) -> None:
        """Blocks: call it in a thread. Raises CudaError where the device has no room for it."""
        self._runtime = runtime
        self._rooms = Arena(size_bytes)
        self._waiting: set[asyncio.Future[None]] = set()
        self._copying = threading.Lock()
        self._closed = False
        self.size_bytes = size_bytes
        self._pointer = runtime.allocate(size_bytes)
        try:
            self.handle = runtime.export(self._pointer)
            self._stream = runtime.make_stream()
        except BaseException:
            runtime.free(self._pointer)
            raise

    def lend(self, num_bytes: int) -> int | None:
        """See Arena."""
        return self._rooms.lend(num_bytes)

    def give_back(self, offset: int) -> None:
        """See Arena. Whoever waits for room looks again.

        A copy into it that was given up may still be under way: the next one is behind it, in the same stream.
        """
        self._rooms.give_back(offset)
        self.wake()

    async def next_change(self) -> None:
        """Wait until room was given back, or until `wake`."""
        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(changed)
        try:
            await changed
        finally:
            self._waiting.discard(changed)

    def wake(self) -> None:
        """Let all who wait for room look around: there may be some, or their connection has ended."""
        for changed in self._waiting:
            if not changed.done():
                changed.set_result(None)

    def write(self, offset: int, data: DeviceBuffer | bytes) -> None:
        """Copy something into a room, and wait until it is there.

        Blocks, but no stream of anybody else: call it in a thread. Raises CudaError.
        """
        with self._copying:  # of several copies in one stream, the last one would be waited for anyway
            if self._closed:
                raise CudaError("the memory for sending has been given back")
            if isinstance(data, DeviceBuffer):
                self._copy(offset, data.pointer, data.nbytes)
            else:
                source = np.frombuffer(data, np.uint8)
                self._copy(offset, source.ctypes.data, source.nbytes)
            self._runtime.synchronize(self._stream)

    def close(self) -> None:
        """Give the memory back, for good, when the copy under way is done. Twice is fine."""
        with self._copying:
            if not self._closed:
                self._closed = True
                self._runtime.destroy_stream(self._stream)
                self._runtime.free(self._pointer)
        self.wake()

    def _copy(self, offset: int, source: int, num_bytes: int) -> None:
        if num_bytes:
            self._runtime.copy(self._pointer + offset, source, num_bytes, self._stream)
