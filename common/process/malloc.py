"""Settings of glibc's malloc. Set them before a process has threads. With another C library (musl, macOS) all calls do
nothing."""

from __future__ import annotations

import ctypes
import sys
from typing import Final

_M_TRIM_THRESHOLD: Final = -1  # from glibc's malloc.h
_M_TOP_PAD: Final = -2
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
LARGE_BYTES: Final = 128 * 2**10
"""glibc's threshold at the start of a process."""
LARGEST_BYTES: Final = 32 * 2**20
"""Largest threshold that glibc permits."""
KEPT_BYTES: Final = 2 * LARGEST_BYTES
"""Twice the threshold, as in glibc's own adjustment."""
_LIBC: Final = ctypes.CDLL(None) if sys.platform == "linux" else None
"""The C library, glibc or another one without these functions."""


def use_one_arena() -> None:
    """Let all threads share a single heap. By default each thread gets a heap, and keeps memory freed there.

    Python's threads take turns: nothing waits longer.
    """
    _set(_M_ARENA_MAX, 1)


def map_large_blocks() -> None:
    """Map every block of LARGE_BYTES and more separately; freed blocks go back to the system.

    By default the threshold grows with freed blocks, up to 32 MiB; later blocks then lie in the heap, between small
    blocks that live on. New pages cost a microsecond or less for each 4 KiB: right for processes that decode into a
    block once.
    """
    _set(_M_MMAP_THRESHOLD, LARGE_BYTES)


def reuse_large_blocks() -> None:
    """Take blocks of less than LARGEST_BYTES from the heap, and keep KEPT_BYTES of free memory at the heap's end.

    For workers: ZMQ takes a block for each message and PyTorch one for each activation, and the first touch of a new
    page takes longer than a read from a socket or a copy. By default both limits grow with the largest freed block.
    Setting one limit ends that adjustment, so both are set to its final values.
    """
    _set(_M_MMAP_THRESHOLD, LARGEST_BYTES)
    _set(_M_TRIM_THRESHOLD, KEPT_BYTES)
    _set(_M_TOP_PAD, KEPT_BYTES)


def return_free_pages(keep_bytes: int = 0) -> None:
    """Return every free page of the heaps to the system, except `keep_bytes` at the end of the main heap and the ends
    of other threads' heaps (`use_one_arena`).

    By itself malloc returns the end of a heap only: a single small block behind a burst keeps the whole burst. The call
    takes a fraction of a millisecond; allocations wait meanwhile, Python's threads do not.
    """
    if (malloc_trim := getattr(_LIBC, "malloc_trim", None)) is not None:
        malloc_trim(ctypes.c_size_t(keep_bytes))


def _set(parameter: int, value: int) -> None:
    if (mallopt := getattr(_LIBC, "mallopt", None)) is not None:
        mallopt(parameter, value)
