"""ZMQ sockets for members of the cluster only: CURVE encrypts, ZAP admits.

    context = ClusterContext(ClusterKey.of(settings))     one per process; without a key everything stays plain
    socket = context.socket(zmq.ROUTER)
    secure_listener(socket)                               before `bind`
    ...
    socket = context.socket(zmq.DEALER)
    secure_client(socket)                                 before `connect`

Both key pairs come from the cluster key: whoever has it can reach every listener and be a listener. A peer without it
does not get through the handshake: libzmq refuses it in its own thread, it never becomes a message, and what it holds
is one connection for at most HANDSHAKE_MS. The server's public key is no secret to a member, but knowing it alone is
not enough: the client's key is checked, too (ZAP, RFC 27), by the context itself.

A frame grows on the wire: MAXMSGSIZE must leave room for OVERHEAD_BYTES. Shared memory and other transports than ZMQ
are not covered. The protocol: RFC 26 (CurveZMQ).
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any, Final

import zmq
import zmq.asyncio
from zmq.utils import z85

from common.keys import ClusterKey

HANDSHAKE_MS: Final = 5000
"""An unproven connection is closed after so long."""
OVERHEAD_BYTES: Final = 64
"""Most bytes that encryption adds to a frame."""
_DOMAIN: Final = b"triptych"
_ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"


@dataclass(frozen=True)
class KeyPair:
    """A CURVE key pair in Z85, as libzmq expects."""

    public: bytes
    secret: bytes

    @classmethod
    def of(cls, key: ClusterKey, purpose: str) -> KeyPair:
        secret = z85.encode(key.derive(purpose))
        return cls(zmq.curve_public(secret), secret)


class ClusterContext(zmq.asyncio.Context):
    """A ZMQ context with the keys of its cluster. Belongs to a single event loop; `destroy` ends the context."""

    server: KeyPair | None = None
    client: KeyPair | None = None
    _doorkeeper: asyncio.Task[None] | None = None

    def __init__(self, key: ClusterKey | None = None) -> None:
        """Derive both key pairs. Without a key, sockets are plain."""
        super().__init__()
        if key is not None:
            self.server, self.client = KeyPair.of(key, "curve server"), KeyPair.of(key, "curve client")

    def keep_door(self) -> None:
        """Begin to answer libzmq's questions about new peers; needs a running loop. Only the first call counts."""
        if self._doorkeeper is None and self.client is not None:
            zap = self.socket(zmq.REP)
            zap.bind(_ZAP_ADDRESS)
            self._doorkeeper = asyncio.get_running_loop().create_task(_answer(zap, z85.decode(self.client.public)))

    def destroy(self, linger: int | None = None) -> None:
        """Close every socket, and end."""
        if self._doorkeeper is not None:
            self._doorkeeper.cancel()
            self._doorkeeper = None
        super().destroy(linger)


def secure_listener(socket: zmq.Socket[Any]) -> None:
    """Let only members of the cluster connect. Call before `bind`, on the loop. Without a key the socket stays
    plain."""
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    context = socket.context
    if not isinstance(context, ClusterContext) or context.server is None:
        return
    context.keep_door()
    socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # were nobody at the door, nobody would come in
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, context.server.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, context.server.secret)


def secure_client(socket: zmq.Socket[Any]) -> None:
    """Connect to members of the cluster only. Call before `connect`. Without a key the socket stays plain."""
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    context = socket.context
    if not isinstance(context, ClusterContext) or context.server is None or context.client is None:
        return
    socket.setsockopt(zmq.CURVE_SERVERKEY, context.server.public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, context.client.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, context.client.secret)


async def _answer(zap: zmq.asyncio.Socket, member: bytes) -> None:
    """Say yes to the members' public key and no to any other, until cancelled."""
    with contextlib.closing(zap):
        while True:
            version, request_id, _domain, _address, _identity, mechanism, *credentials = await zap.recv_multipart()
            welcome = mechanism == b"CURVE" and credentials == [member]
            status = [b"200", b"OK"] if welcome else [b"400", b"not a member of this cluster"]
            await zap.send_multipart([version, request_id, *status, b"", b""])
