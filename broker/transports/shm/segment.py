"""Anonymous memory shared by two processes: without a name, and gone when both processes are.

Made by memfd_create(2) and sealed against changes of size: a reader never runs into pages that the writer has removed.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np

from broker.transports.received import Bytes

_MAP_FIXED: Final = 0x10  # from Linux's mman-common.h
_FIXED_SIZE: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@dataclass(frozen=True)
class ArenaSlice:
    """The memory of one message's tensors: a slice of an arena, or memory of its own behind a descriptor."""

    slot: int
    memory: Bytes
    offset: int = 0
    fd: int | None = None


def create(size_bytes: int) -> tuple[int, Bytes]:
    """New memory of `size_bytes` (> 0), zeroed, as a file descriptor to pass on and close, and as an array to write."""
    fd = os.memfd_create("triptych", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FIXED_SIZE | fcntl.F_SEAL_SEAL)
        return fd, np.frombuffer(mmap.mmap(fd, size_bytes), np.uint8)
    except BaseException:
        os.close(fd)
        raise


def discard(memory: Bytes, start: int) -> None:
    """Give memory of `create` back to the system, from byte `start` (of a page) on; later reads find zeros."""
    mapped: Any = memory.base
    mapped.obj.madvise(mmap.MADV_REMOVE, start, memory.size - start)


def open_received(fd: int, size_bytes: int, *, writable: bool = False) -> Bytes:
    """Map the memory behind another process's descriptor, read-only unless `writable`. `fd` stays open.

    Raises ValueError unless the descriptor is sealed memory of `size_bytes`; OSError if the mapping fails.
    """
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _FIXED_SIZE == _FIXED_SIZE
    except OSError as error:  # no memory but a file, a pipe, a socket
        raise ValueError(f"descriptor {fd} is no shared memory: {error}") from error
    actual = os.fstat(fd).st_size
    if not sealed or actual != size_bytes or size_bytes == 0:
        raise ValueError(f"shared memory of {actual} bytes, sealed: {sealed}; {size_bytes} sealed bytes were announced")
    if not writable:
        return np.frombuffer(mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ), np.uint8)
    return np.frombuffer(_map(fd, size_bytes), np.uint8)


def _map(fd: int, size_bytes: int) -> mmap.mmap:
    """Map shared memory over anonymous memory, without the descriptor that Python's mmap would keep. Raises OSError."""
    mapped = mmap.mmap(-1, size_bytes)
    start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    allowed, how = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    if _system_mmap()(start, size_bytes, allowed, how, fd, 0) != start:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return mapped


@cache
def _system_mmap() -> Any:
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    function.restype = ctypes.c_void_p
    return function
