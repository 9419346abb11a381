"""A GPU's memory shared between processes: a single allocation, reserved in slices.

The arena lives as long as its owner: no receiver ever reads memory of another owner. Copies go over a stream of its
own, which no step of an engine waits for.
"""

from __future__ import annotations

import threading
from typing import Final

import numpy as np

from broker.transports.arena import Arena, Notifier
from broker.transports.cuda.runtime import CudaError, CudaRuntime
from broker.transports.payload import DeviceBuffer

ARENA_BYTES: Final = 128 * 2**20
"""Of the device, for each process that sends; common.process.gpu_memory subtracts these bytes from the pools' share."""


class DeviceArena(Arena):
    """Slices for tensors on their way. Belongs to the loop, but for the blocking methods.

    `changed` wakes callers that wait for memory.
    """

    def __init__(self, runtime: CudaRuntime, size_bytes: int = ARENA_BYTES) -> None:
        """Allocate; blocks, so call in a thread. Raises CudaError if the device has no memory left."""
        super().__init__(size_bytes)
        self.changed = Notifier()
        self._runtime = runtime
        self._copying = threading.Lock()
        self._closed = False
        self.pointer = runtime.allocate(size_bytes)
        try:
            self._stream = runtime.make_stream()
        except BaseException:
            runtime.free(self.pointer)
            raise

    def release(self, offset: int) -> None:
        """Release a slice without a pending copy: the order of two threads' copies is unknown."""
        super().release(offset)
        self.changed.notify()

    def write(self, offset: int, data: DeviceBuffer | bytes) -> None:
        """Copy `data` into a slice, and wait for the copy. Blocks: call in a thread. Raises CudaError."""
        if isinstance(data, DeviceBuffer):
            self._copy(self.pointer + offset, data.pointer, data.nbytes)
        else:
            source = np.frombuffer(data, np.uint8)
            self._copy(self.pointer + offset, source.ctypes.data, source.nbytes)

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Bring the bytes of a slice to the host. Blocks and raises as `write`."""
        host = np.zeros(num_bytes, np.uint8)
        self._copy(host.ctypes.data, self.pointer + offset, num_bytes)
        return host.tobytes()

    def close(self) -> None:
        """Free the memory when the copy under way is done. Idempotent."""
        with self._copying:
            if not self._closed:
                self._closed = True
                self._runtime.destroy_stream(self._stream)
                self._runtime.free(self.pointer)
        self.changed.notify()

    def _copy(self, target: int, source: int, num_bytes: int) -> None:
        with self._copying:  # of several copies in one stream, the last one would be waited for anyway
            if self._closed:
                raise CudaError("the memory for tensors on their way has been given back")
            if num_bytes:
                self._runtime.copy(target, source, num_bytes, self._stream)
            self._runtime.synchronize(self._stream)


class ExportArena(DeviceArena):
    """A DeviceArena for other processes of this host, which open the arena by its handle."""

    def __init__(self, runtime: CudaRuntime, size_bytes: int = ARENA_BYTES) -> None:
        """Blocks and raises as DeviceArena."""
        super().__init__(runtime, size_bytes)
        try:
            self.handle = runtime.export(self.pointer)
        except BaseException:
            self.close()
            raise
