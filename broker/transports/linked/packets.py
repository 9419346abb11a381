"""Whole messages with file descriptors over a Unix socket (SOCK_SEQPACKET) on an asyncio loop.

The sockets are abstract (unix(7)): a name without a file, gone with the process, and visible only in the same network
namespace of the same host.
"""

from __future__ import annotations

import array
import asyncio
import errno
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Final

from common.telemetry import get_logger

MAX_PACKET_BYTES: Final = 96 * 2**10
MAX_FDS: Final = 4
BACKLOG: Final = 128
NO_DESCRIPTORS_S: Final = 1.0
"""Pause of a listener in a process, or a system, that has no descriptors or memory left for another peer."""
_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_FDS_BYTES: Final = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)
_CLOSE_ON_EXEC, _NO_SIGNAL = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_NOSIGNAL)  # enums cost a microsecond each
_TRUNCATED: Final = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)

log = get_logger()


def listen(name: str) -> socket.socket:
    """A listening socket under an abstract name. Raises OSError where the name is taken."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        listener.bind("\0" + name)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def connect(name: str) -> socket.socket:
    """Connect at once or raise OSError: no listener, or too many waiting clients."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        client.connect("\0" + name)
    except BaseException:
        client.close()
        raise
    return client


class SameUserListener:
    """Listens under a new abstract name until closed. Made, used and closed on a running loop."""

    def __init__(self, on_peer: Callable[[socket.socket], None], on_refused: Callable[[], None]) -> None:
        """Listen. `on_peer` owns each connected socket, `on_refused` hears of other users. Raises OSError."""
        self.name = f"triptych-{secrets.token_hex(16)}"
        self._on_peer = on_peer
        self._on_refused = on_refused
        self._loop = asyncio.get_running_loop()
        self._socket = listen(self.name)
        self._begin()

    def _begin(self) -> None:
        if self._socket.fileno() >= 0:  # not closed meanwhile
            self._loop.add_reader(self._socket, self._accept)

    def close(self) -> None:
        """Stop accepting. Idempotent."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()

    def _accept(self) -> None:
        try:
            connected, _ = self._socket.accept()
        except OSError as error:  # it has left again
            if error.errno in _EXHAUSTED:  # or it stays, and the loop would do nothing but ask again
                self._loop.remove_reader(self._socket)
                self._loop.call_later(NO_DESCRIPTORS_S, self._begin)
            return
        connected.setblocking(False)
        credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] == os.geteuid():  # the other side's user, by the kernel's word
            self._on_peer(connected)
        else:
            connected.close()
            self._on_refused()


class PacketSocket:
    """A connected socket, for the loop; `try_send` is for any thread.

    `on_packet` owns the descriptors of each packet, and may use the bytes until it returns.
    `on_end` is called once, when the other side has gone, has sent too much, or `on_packet` has raised; not after
    `close`. ValueError and OSError accuse the other side, any other exception this process.
    """

    def __init__(
        self,
        connected: socket.socket,
        on_packet: Callable[[memoryview, list[int]], None],
        on_end: Callable[[Exception | None], None],
    ) -> None:
        self._socket = connected
        self._on_packet = on_packet
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._buffer = memoryview(bytearray(MAX_PACKET_BYTES))  # used again: a new one costs more than most packets
        self._sending = asyncio.Lock()
        # A descriptor must not be closed, and become another's, while a thread sends to it. Finalizers send, too, and
        # may run within a send.
        self._open = threading.RLock()
        self._writable: asyncio.Future[None] | None = None
        self._loop.add_reader(connected, self.read)

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0

    def try_send(self, packet: bytes, fds: Sequence[int] = ()) -> bool:
        """Send without waiting; False if the socket is full. Raises OSError if the other side has gone."""
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            with self._open:
                self._socket.sendmsg([packet], ancillary, _NO_SIGNAL)
        except BlockingIOError:
            return False
        return True

    async def send(self, packet: bytes, fds: Sequence[int] = ()) -> None:
        """Send as soon as the socket has space. Raises OSError if the other side has gone."""
        async with self._sending:
            while not self.try_send(packet, fds):
                self._writable = self._loop.create_future()
                self._loop.add_writer(self._socket, self._now_writable)
                await self._writable

    def read(self) -> None:
        """Read every waiting packet, ahead of the loop."""
        try:
            while not self.closed:
                try:
                    size, ancillary, flags, _ = self._socket.recvmsg_into([self._buffer], _FDS_BYTES, _CLOSE_ON_EXEC)
                except BlockingIOError:  # the socket is empty
                    return
                fds = _descriptors(ancillary) if ancillary else []
                if flags & _TRUNCATED:
                    close_all(fds)
                    raise ValueError("a packet is too long")
                if size:
                    self._on_packet(self._buffer[:size], fds)
                else:
                    close_all(fds)
                    self._end(None)
        except (OSError, ValueError) as error:
            self._end(error)
        except Exception as error:  # a bug: without an end here, the other side would wait for an answer in vain
            log.error("a connection between processes ends by a fault of this process", exc_info=True)
            self._end(error)

    def close(self) -> None:
        """Close the socket; a waiting `send` raises."""
        if self.closed:
            return
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        if self._writable is not None and not self._writable.done():
            self._writable.set_exception(ConnectionResetError("the connection is closed"))
        with self._open:
            self._socket.close()

    def _now_writable(self) -> None:
        self._loop.remove_writer(self._socket)
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    def _end(self, error: Exception | None) -> None:
        if not self.closed:
            self.close()
            self._on_end(error)


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()
