"""A TCP connection that can be cut: it stands between a process and what it connects to, and does what networks do."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from types import TracebackType
from typing import Final, Literal

Mode = Literal["pass", "stall", "drop", "reset"]
"""`pass`: as if there were nothing. `stall`: bytes wait, and go on when it passes again. `drop`: bytes vanish, and so
does every new connection's first word: what had been sent meanwhile is lost when it passes again, and connections
are broken then. `reset`: all connections are reset, new ones at once.
"""
_CHUNK: Final = 65536
_POLL_S: Final = 0.02
_RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s: closing sends RST


class Cable:
    """Listens on a port of its own and forwards to `target`, as long as it passes."""

    def __init__(self, target: tuple[str, int], listen: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self._target = target
        self._listener = socket.create_server(listen)
        self._mode: Mode = "pass"
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    def set(self, mode: Mode) -> None:
        """What happens to bytes from now on."""
        with self._lock:
            broken = mode == "reset" or self._mode == "drop"
            self._mode = mode
            if broken:
                self._break_all()

    def close(self) -> None:
        self._closed.set()
        self._listener.close()
        with self._lock:
            self._break_all()
        for thread in self._threads:
            thread.join(5)

    def __enter__(self) -> Cable:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            readable, _, _ = (
                select.select([self._listener], [], [], _POLL_S) if self._open(self._listener) else ([],) * 3
            )
            if not readable:
                continue
            with contextlib.suppress(OSError):
                self._connect(self._listener.accept()[0])

    def _connect(self, near: socket.socket) -> None:
        if self._mode == "reset":
            _reset(near)
            return
        try:
            far = socket.create_connection(self._target, timeout=5)
        except OSError:
            _reset(near)
            return
        with self._lock:
            self._pairs.add((near, far))
        for source, sink in ((near, far), (far, near)):
            sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            thread = threading.Thread(target=self._forward, args=(source, sink, (near, far)), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _forward(self, source: socket.socket, sink: socket.socket, pair: tuple[socket.socket, socket.socket]) -> None:
        with contextlib.suppress(OSError, ValueError):
            while self._open(source):
                if self._mode == "stall":
                    self._closed.wait(_POLL_S)
                    continue
                if not select.select([source], [], [], _POLL_S)[0]:
                    continue
                chunk = source.recv(_CHUNK)
                while self._mode == "stall" and not self._closed.wait(_POLL_S):
                    pass
                if not chunk:
                    break
                if self._mode == "pass":
                    sink.sendall(chunk)
        with self._lock:
            self._pairs.discard(pair)
        for end in pair:
            end.close()

    def _open(self, end: socket.socket) -> bool:
        return not self._closed.is_set() and end.fileno() >= 0

    def _break_all(self) -> None:
        for pair in self._pairs:
            for end in pair:
                _reset(end)
        self._pairs.clear()


def _reset(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    end.close()
