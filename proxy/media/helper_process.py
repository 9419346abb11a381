"""For helper processes that read media of clients: their errors, and data that they share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import TriptychError


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
