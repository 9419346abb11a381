"""A TCP connection that can be cut: it stands between processes and what they connect to, and does what networks do."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final, Literal

Mode = Literal["pass", "stall", "drop", "reset"]
"""`pass`: as if there were nothing. `stall`: bytes wait, and go on when it passes again. `drop`: bytes vanish, and so
does every new connection's first word: what had been sent meanwhile is lost when it passes again, and connections
are broken then. `reset`: all connections are reset, new ones at once.
"""
Pair = tuple[socket.socket, socket.socket]
Source = Callable[[tuple[str, int], tuple[str, int]], str | None]
"""Who has connected, by both ends of a connection; None for nobody whom one knows."""
_CHUNK: Final = 65536
_POLL_S: Final = 0.02
_RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s: closing sends RST


class FaultyLink:
    """Listens on a port of its own and forwards to `target`, as long as it passes.

    `source` tells who has connected: a cable may be cut for some and not for others.
    """

    def __init__(
        self,
        target: tuple[str, int],
        listen: tuple[str, int] = ("127.0.0.1", 0),
        source: Source = lambda near, far: None,
    ) -> None:
        self._target = target
        self._source = source
        self._listener = socket.create_server(listen)
        self._mode: Mode = "pass"
        self._concerns: Callable[[str | None], bool] = _everybody
        self._pairs: dict[Pair, str | None] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    def set(self, mode: Mode, concerns: Callable[[str | None], bool] | None = None) -> None:
        """What happens to bytes from now on, of the connections of everybody, or of those whom it `concerns`."""
        with self._lock:
            broken = mode == "reset" or self._mode == "drop"
            past, self._mode, self._concerns = self._concerns, mode, concerns or _everybody
            if broken:
                self._break(self._concerns if mode == "reset" else past)

    def close(self) -> None:
        self._closed.set()
        self._listener.close()
        with self._lock:
            self._break(_everybody)
        for thread in self._threads:
            thread.join(5)

    def __enter__(self) -> FaultyLink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(OSError, ValueError):  # closed meanwhile
                if select.select([self._listener], [], [], _POLL_S)[0]:
                    self._connect(self._listener.accept()[0])

    def _connect(self, near: socket.socket) -> None:
        source = self._source(near.getpeername()[:2], near.getsockname()[:2])
        if self._mode_for(source) == "reset":
            _reset(near)
            return
        try:
            far = socket.create_connection(self._target, timeout=5)
        except OSError:
            _reset(near)
            return
        with self._lock:
            self._pairs[near, far] = source
            if self._mode_for(source) == "reset":  # set while this connection was being made
                self._break(self._concerns)
                return
        for giver, sink in ((near, far), (far, near)):
            sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            thread = threading.Thread(target=self._forward, args=(giver, sink, (near, far), source), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _forward(self, giver: socket.socket, sink: socket.socket, pair: Pair, source: str | None) -> None:
        with contextlib.suppress(OSError, ValueError):
            while self._open(giver):
                if self._mode_for(source) == "stall":
                    self._closed.wait(_POLL_S)
                    continue
                if not select.select([giver], [], [], _POLL_S)[0]:
                    continue
                chunk = giver.recv(_CHUNK)
                while self._mode_for(source) == "stall" and not self._closed.wait(_POLL_S):
                    pass
                if not chunk:
                    break
                if self._mode_for(source) == "pass":
                    sink.sendall(chunk)
        with self._lock:
            self._pairs.pop(pair, None)
        for end in pair:
            end.close()

    def _open(self, end: socket.socket) -> bool:
        return not self._closed.is_set() and end.fileno() >= 0

    def _mode_for(self, source: str | None) -> Mode:
        return self._mode if self._concerns(source) else "pass"

    def _break(self, concerns: Callable[[str | None], bool]) -> None:
        for pair in [pair for pair, source in self._pairs.items() if concerns(source)]:
            del self._pairs[pair]
            for end in pair:
                _reset(end)


def _everybody(_: str | None) -> bool:
    return True


def _reset(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    end.close()
