"""Anonymous memory that two processes share: it has no name, so nothing is left of it when both are gone.

Made by memfd_create(2), passed on as a file descriptor, sealed against changes of its size: a reader can never run into
pages that the writer has taken away.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
AVAILABLE: Final = hasattr(os, "memfd_create")
"""False elsewhere than on Linux."""
_FIXED_SIZE: Final = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)


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
    """Give the system back what `create` has made, from byte `start` (of a page) on: it reads as zeros now."""
    mapped: Any = memory.base
    mapped.obj.madvise(mmap.MADV_REMOVE, start, memory.size - start)


def open_received(fd: int, size_bytes: int) -> Bytes:
    """The memory behind a file descriptor from another process, to be read only. `fd` stays open.

    Raises ValueError where it is not sealed memory of `size_bytes`; OSError where it cannot be mapped.
    """
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _FIXED_SIZE == _FIXED_SIZE
    except OSError as error:  # no memory but a file, a pipe, a socket
        raise ValueError(f"descriptor {fd} is no shared memory: {error}") from error
    actual = os.fstat(fd).st_size
    if not sealed or actual != size_bytes or size_bytes == 0:
        raise ValueError(f"shared memory of {actual} bytes, sealed: {sealed}; {size_bytes} sealed bytes were announced")
    return np.frombuffer(mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ), np.uint8)
