"""What a helper process of `common.process.child_pool` does besides its work. Imports little: every helper does."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from common.process import malloc

T = TypeVar("T")


def begin(memory_bytes: int, initialize: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """The first thing that a helper does."""
    initialize(*arguments)
    limit_resources(memory_bytes)


def work(call: Callable[[], T]) -> T:
    """What `call` returns or raises; free memory goes back to the system, however large the item was."""
    try:
        return call()
    finally:
        malloc.give_back()


def limit_resources(memory_bytes: int) -> None:
    """Let this process take so much more address space than it has now; what goes beyond is a MemoryError, or an end.

    Elsewhere than on Linux, only core dumps are turned off.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it would hold somebody's picture
    with contextlib.suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        limit = pages * os.sysconf("SC_PAGE_SIZE") + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit if most < 0 else min(limit, most), most))
        Path("/proc/self/oom_score_adj").write_text("1000")  # rather this one than the service
