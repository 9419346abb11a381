"""Output that never blocks the writer: a slow or missing reader, or a full disk, loses text."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from typing import Final, TextIO

MAX_PIECES: Final = 1000
"""Kept for a reader that is slow; what comes while there are so many is lost."""


class NonblockingStream:
    """A writer to the file behind a stream, on a separate thread; never raises."""

    def __init__(self, stream: TextIO) -> None:
        """Start the thread. Raises io.UnsupportedOperation for a stream without a file."""
        self._stream = stream
        self._descriptor = stream.fileno()
        self.encoding = stream.encoding or "utf-8"
        self._pieces: queue.Queue[str | None] = queue.Queue(MAX_PIECES)
        self._thread = threading.Thread(target=self._write, name="output", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        with contextlib.suppress(queue.Full):
            self._pieces.put_nowait(text)
        return len(text)

    def flush(self) -> None:
        """Do nothing: `close` waits."""

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._descriptor

    def close(self, timeout_s: float = 1.0) -> None:
        """Wait shortly for unwritten text."""
        with contextlib.suppress(queue.Full):
            self._pieces.put_nowait(None)
            self._thread.join(timeout_s)

    def _write(self) -> None:
        while (text := self._pieces.get()) is not None:
            data = text.encode(self.encoding, "replace")
            with contextlib.suppress(OSError):
                while data:
                    data = data[os.write(self._descriptor, data) :]
