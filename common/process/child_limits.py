"""Limits of a helper process of `common.process.child_pool`. Imports little: every helper loads this module."""

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
    """Initialize a new helper, then limit its resources."""
    initialize(*arguments)
    limit_resources(memory_bytes)


def work(call: Callable[[], T]) -> T:
    """Return the result of `call`; afterwards free memory goes back to the system, however large the item was."""
    try:
        return call()
    finally:
        malloc.give_back()


def limit_resources(memory_bytes: int) -> None:
    """Let this process take `memory_bytes` of address space beyond the present size. Beyond that limit follows a
    MemoryError or the end.

    Elsewhere than on Linux, only core dumps are turned off.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it would hold somebody's picture
    with contextlib.suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        limit = pages * os.sysconf("SC_PAGE_SIZE") + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit if most < 0 else min(limit, most), most))
        Path("/proc/self/oom_score_adj").write_text("1000")  # rather this one than the service
