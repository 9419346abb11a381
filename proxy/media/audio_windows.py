"""Helper processes that cut untrusted recordings: a crash there does not end the proxy."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from common.errors import TriptychError
from common.process.child_pool import ChildPool
from proxy.media import audio
from proxy.media.audio import Window

NUM_PROCESSES: Final = 2
TIMEOUT_S: Final = 120.0
"""Two hours of audio are decoded in a fraction of this."""
MEMORY_BYTES: Final = 512 * 2**20
"""Enough for blocks of seconds."""


class AudioWindows(ChildPool):
    """Pool of helper processes that decode audio."""

    def __init__(self, on_crash: Callable[[], object] = lambda: None) -> None:
        """`on_crash` is called on the loop when a helper has died or exceeded TIMEOUT_S."""
        super().__init__(
            audio.initialize,
            (os.getpid(),),
            work="decoding",
            num_workers=NUM_PROCESSES,
            timeout_s=TIMEOUT_S,
            memory_bytes=MEMORY_BYTES,
            on_crash=on_crash,
        )

    async def split(self, path: str, window_s: float, param: str) -> list[Window]:
        """Run `audio.split`; also raises as `run` does, naming `param`."""
        with _naming(param):
            return await self.run(param, audio.split, path, window_s, param)

    async def cut(self, path: str, window: Window, param: str) -> bytes:
        """Run `audio.cut`; also raises as `run` does, naming `param`."""
        with _naming(param):
            return await self.run(param, audio.cut, path, window, param)


@contextmanager
def _naming(param: str) -> Iterator[None]:
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
