"""For helper processes that read media of clients: their start, their errors, and data that they share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from broker.cluster.lifetime import die_with_parent
from common.errors import TriptychError
from common.process import malloc


@contextmanager
def naming(param: str) -> Iterator[None]:
    """Name the field of the request in errors without a field."""
    try:
        yield
    except TriptychError as error:
        raise TriptychError(error.info.code, error.info.message, error.info.param or param) from error


@contextmanager
def shared(data: bytes) -> Iterator[str]:
    """Yield a path under which helpers read `data` within the block, without a file on disk."""
    descriptor = os.memfd_create("recording")
    with open(descriptor, "wb", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) or 0 :]
        yield f"/proc/{os.getpid()}/fd/{descriptor}"


def initialize(parent_pid: int) -> None:
    """Prepare a helper process: end with the parent, ignore the terminal's Ctrl-C, return large blocks of memory."""
    malloc.map_large_blocks()
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
