"""A socket for processes of the same user on the same host."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable

from broker.transports.linked import packets


class SameUserListener:
    """Listens under a new abstract name until closed. Made, used and closed on a running loop."""

    def __init__(self, on_peer: Callable[[socket.socket], None], on_refused: Callable[[], None]) -> None:
        """Listen. `on_peer` owns each connected socket, `on_refused` hears of other users. Raises OSError if the system
        has no abstract sockets."""
        self.name = f"triptych-{secrets.token_hex(16)}"
        self._on_peer = on_peer
        self._on_refused = on_refused
        self._loop = asyncio.get_running_loop()
        self._socket = packets.listen(self.name)
        self._loop.add_reader(self._socket, self._accept)

    def close(self) -> None:
        """Stop accepting. Idempotent."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()

    def _accept(self) -> None:
        try:
            connected, _ = self._socket.accept()
        except OSError:  # it has left again, or there are no descriptors: the next one tries anew
            return
        connected.setblocking(False)
        if packets.peer_uid(connected) == os.geteuid():
            self._on_peer(connected)
        else:
            connected.close()
            self._on_refused()
