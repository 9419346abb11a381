"""How glibc's malloc keeps memory. Has to be told before a process has threads."""

from __future__ import annotations

import ctypes
import sys
from typing import Final

_M_ARENA_MAX: Final = -8  # from glibc's malloc.h


def use_one_arena() -> None:
    """Let all threads take from one heap. By default each gets its own, and what it has freed stays in it.

    Large tensors are mapped by themselves either way, and Python's threads take turns: nothing waits longer. Does
    nothing where the C library has no arenas (musl, macOS).
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_ARENA_MAX, 1)
