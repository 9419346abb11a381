"""CUDA without a GPU: device memory is memory of the host that another process can map, and streams are queues.

It keeps to what CUDA promises and to nothing beyond: a copy happens when its stream is waited for, never before, and
memory that has been allocated or whose copy is still to come holds garbage. So whoever reads without having waited, or
waits for the wrong stream, gets other bytes. Unlike CUDA it lets a process open a handle of its own.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from broker.transports.cuda.runtime import HANDLE_BYTES, CudaError
from broker.transports.payload import DeviceBuffer

GARBAGE = 0xA5
_TOUCHED_BYTES = 8 * 2**20
"""Of an allocation, which hold garbage from the beginning: arenas are larger than what tests put into them."""


@dataclass(frozen=True)
class _Memory:
    """Mapped memory: that of this process if `fd` is set, else somebody else's."""

    array: npt.NDArray[np.uint8]
    fd: int = -1

    @property
    def pointer(self) -> int:
        return int(self.array.ctypes.data)


class FakeCuda:
    """See broker.transports.cuda.runtime.CudaRuntime. `peers` are the other GPUs that this one can read, `nixl_kind` is
    what NIXL is told that the memory is: DRAM, which it is, or VRAM, which NIXL finds out to be wrong."""

    def __init__(
        self, device_id: str = "0000:01:00.0", peers: tuple[str, ...] = (), nixl_kind: Literal["DRAM", "VRAM"] = "DRAM"
    ) -> None:
        self._device_id = device_id
        self._peers = peers
        self._nixl_kind = nixl_kind
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._allocated: dict[int, _Memory] = {}
        self._opened: dict[int, _Memory] = {}
        self._streams: dict[int, deque[tuple[int, int, int]]] = {}  # copies that they have been told, and not done

    @property
    def device_id(self) -> str:
        return self._device_id

    @property
    def num_held(self) -> int:
        """Allocations, open handles and streams."""
        return len(self._allocated) + len(self._opened) + len(self._streams)

    @property
    def nixl_memory(self) -> tuple[Literal["DRAM", "VRAM"], int]:
        return self._nixl_kind, 0

    def make_current(self) -> None:
        """Nothing: no other library looks for this device."""

    def can_read(self, device_id: str) -> bool:
        return device_id == self._device_id or device_id in self._peers

    def allocate(self, num_bytes: int) -> int:
        fd = os.memfd_create("triptych-fake-cuda")
        os.ftruncate(fd, num_bytes)
        memory = _Memory(_map(fd, num_bytes), fd)
        memory.array[:_TOUCHED_BYTES] = GARBAGE
        self._allocated[memory.pointer] = memory
        return memory.pointer

    def free(self, pointer: int) -> None:
        memory = self._found(self._allocated, pointer)
        os.close(memory.fd)
        del self._allocated[pointer]

    def export(self, pointer: int) -> bytes:
        memory = self._found(self._allocated, pointer)
        return f"{os.getpid()} {memory.fd}".encode().ljust(HANDLE_BYTES, b"\0")

    def open(self, handle: bytes) -> int:
        try:
            process, descriptor = (int(part) for part in handle.rstrip(b"\0").split())
            fd = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR)
        except (ValueError, OSError) as error:
            raise CudaError(f"invalid handle: {error}") from error
        memory = _Memory(_map(fd, os.fstat(fd).st_size))
        os.close(fd)
        self._opened[memory.pointer] = memory
        return memory.pointer

    def close(self, pointer: int) -> None:
        self._found(self._opened, pointer)
        del self._opened[pointer]

    def make_stream(self) -> int:
        number = next(self._numbers)
        self._streams[number] = deque()
        return number

    def destroy_stream(self, stream: int) -> None:
        self._found(self._streams, stream)
        del self._streams[stream]

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        ctypes.memset(target, GARBAGE, num_bytes)  # what is there until the copy is done
        self._found(self._streams, stream).append((target, source, num_bytes))

    def synchronize(self, stream: int) -> None:
        todo = self._found(self._streams, stream)
        with self._lock:
            while todo:
                ctypes.memmove(*todo.popleft())

    # --- what a test does, and looks at

    def upload(self, data: bytes | memoryview) -> DeviceBuffer:
        """Device memory that holds `data`, which is freed with the buffer."""
        data = bytes(data)
        pointer = self.allocate(max(1, len(data)))
        ctypes.memmove(pointer, data, len(data))
        return DeviceBuffer(pointer, len(data), owner=_Owner(self, pointer), _to_host=lambda: memoryview(data))

    def read(self, buffer: DeviceBuffer) -> bytes:
        """What lies in device memory at this moment, whether or not it is there yet."""
        return ctypes.string_at(buffer.pointer, buffer.nbytes)

    def _found(self, among: dict[int, Any], number: int) -> Any:
        if number not in among:
            raise CudaError(f"invalid argument {number}")
        return among[number]


class _Owner:
    """Frees what `upload` has allocated."""

    def __init__(self, cuda: FakeCuda, pointer: int) -> None:
        self._cuda, self._pointer = cuda, pointer

    def __del__(self) -> None:
        self._cuda.free(self._pointer)


def _map(fd: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(fd, num_bytes), np.uint8)
