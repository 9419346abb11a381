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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from broker.transports.cuda_runtime import HANDLE_BYTES, CudaError
from broker.transports.payload import DeviceBuffer

GARBAGE = 0xA5


@dataclass(frozen=True)
class _Memory:
    """Mapped memory: that of this process if `fd` is set, else somebody else's."""

    array: npt.NDArray[np.uint8]
    fd: int = -1

    @property
    def pointer(self) -> int:
        return int(self.array.ctypes.data)


@dataclass
class _Stream:
    """What it has been told and not done yet."""

    todo: deque[Callable[[], None]] = field(default_factory=deque)
    num_done: int = 0

    def do_one(self) -> None:
        self.todo.popleft()()
        self.num_done += 1


class FakeCuda:
    """See broker.transports.cuda_runtime.CudaRuntime. `peers` are the other GPUs that this one can read."""

    def __init__(self, device_id: str = "0000:01:00.0", peers: tuple[str, ...] = ()) -> None:
        self._device_id = device_id
        self._peers = peers
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()
        self._allocated: dict[int, _Memory] = {}
        self._opened: dict[int, _Memory] = {}
        self._streams: dict[int, _Stream] = {}
        self._events: dict[int, tuple[_Stream, int]] = {}  # behind so many of the stream's tasks

    @property
    def device_id(self) -> str:
        return self._device_id

    @property
    def num_held(self) -> int:
        """Allocations, open handles and streams."""
        return len(self._allocated) + len(self._opened) + len(self._streams)

    def can_read(self, device_id: str) -> bool:
        return device_id == self._device_id or device_id in self._peers

    def allocate(self, num_bytes: int) -> int:
        fd = os.memfd_create("triptych-fake-cuda")
        os.ftruncate(fd, num_bytes)
        memory = _Memory(_map(fd, num_bytes), fd)
        memory.array[:] = GARBAGE
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
        self._streams[number] = _Stream()
        return number

    def destroy_stream(self, stream: int) -> None:
        self._found(self._streams, stream)
        del self._streams[stream]

    def wait_event(self, stream: int, event: int) -> None:
        source, position = self._found(self._events, event)

        def behind() -> None:
            while source.num_done < position:
                source.do_one()

        self._tell(stream, behind)

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        ctypes.memset(target, GARBAGE, num_bytes)  # what is there until the copy is done
        self._tell(stream, lambda: _move(target, source, num_bytes))

    def synchronize(self, stream: int) -> None:
        found = self._found(self._streams, stream)
        with self._lock:
            while found.todo:
                found.do_one()

    # --- what an engine does, and a test looks at

    def record(self, stream: int) -> int:
        """An event behind all that a stream has been told."""
        found, event = self._found(self._streams, stream), next(self._numbers)
        self._events[event] = found, found.num_done + len(found.todo)
        return event

    def upload(self, data: bytes | memoryview, stream: int | None = None) -> DeviceBuffer:
        """Device memory that will hold `data`: written already, or by a stream that nobody has waited for yet."""
        data = bytes(data)
        pointer = self.allocate(max(1, len(data)))
        source = np.frombuffer(data, np.uint8)
        ready = None
        if stream is None:
            _move(pointer, int(source.ctypes.data), len(data))
        else:
            self._tell(stream, lambda: _move(pointer, int(source.ctypes.data), len(data)))
            ready = self.record(stream)
        return DeviceBuffer(pointer, len(data), ready, owner=_Owner(self, pointer), _to_host=lambda: memoryview(data))

    def read(self, buffer: DeviceBuffer) -> bytes:
        """What lies in device memory at this moment, whether or not it is there yet."""
        return ctypes.string_at(buffer.pointer, buffer.nbytes)

    def _tell(self, stream: int, task: Callable[[], None]) -> None:
        with self._lock:
            self._found(self._streams, stream).todo.append(task)

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


def _move(target: int, source: int, num_bytes: int) -> None:
    ctypes.memmove(target, source, num_bytes)
