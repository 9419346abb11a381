"""Recordings of strangers, looked into and cut by processes that may die without taking the proxy along."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from common.errors import TriptychError
from common.process.child_pool import ChildPool
from proxy.media import audio
from proxy.media.audio import Window
from proxy.media.audio_decoder_process import initialize

NUM_PROCESSES: Final = 2
TIMEOUT_S: Final = 120.0
"""Two hours of sound are decoded in a fraction of this."""
MEMORY_BYTES: Final = 512 * 2**20
"""Sound is decoded in blocks of seconds."""


class AudioWindows(ChildPool):
    """Helpers that decode sound."""

    def __init__(self, on_crash: Callable[[], object] = lambda: None) -> None:
        """`on_crash` is called on the loop when one has died, or has taken longer than TIMEOUT_S."""
        super().__init__(
            initialize,
            (os.getpid(),),
            work="decoding",
            num_workers=NUM_PROCESSES,
            timeout_s=TIMEOUT_S,
            memory_bytes=MEMORY_BYTES,
            on_crash=on_crash,
        )

    async def split(self, path: str, window_s: float, param: str) -> list[Window]:
        """As `audio.split`; raises as `run` does, too, naming `param`."""
        with _naming(param):
            return await self.run(param, audio.split, path, window_s, param)

    async def cut(self, path: str, window: Window, param: str) -> bytes:
        """As `audio.cut`; raises as `run` does, too, naming `param`."""
        with _naming(param):
            return await self.run(param, audio.cut, path, window, param)


@contextmanager
def _naming(param: str) -> Iterator[None]:
    """What goes wrong within names the field of the request."""
    try:
        yield
    except TriptychError as error:
        raise TriptychError(error.info.code, error.info.message, error.info.param or param) from error


@contextmanager
def shared(data: bytes) -> Iterator[str]:
    """A path under which the helpers read `data` for the length of the block, without a file on any disk."""
    descriptor = os.memfd_create("recording")
    with open(descriptor, "wb", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) or 0 :]
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
