"""ZMQ sockets for members of the cluster only: CURVE encrypts, ZAP admits, and a vanished host is noticed.

    context = ClusterContext(ClusterKey.of(settings))     one per process; without a key everything stays plain
    socket = context.socket(zmq.ROUTER)
    address = secure_bind(socket, host)
    ...
    socket = context.socket(zmq.DEALER)
    secure_connect(socket, address)

Both key pairs come from the cluster key: with the key, a process reaches every listener and can be a listener. libzmq
refuses a peer without the key in the handshake. Such a peer sends no message, and holds one connection for at most
HANDSHAKE_MS. The server's public key alone is not enough: pyzmq's authenticator checks the client's key (ZAP, RFC 27).

A frame grows on the wire: MAXMSGSIZE must leave room for OVERHEAD_BYTES. Other transports than ZMQ are not covered.
The protocol: RFC 26 (CurveZMQ).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils import z85

from common.keys import ClusterKey

HANDSHAKE_MS: Final = 5000
"""An unproven connection is closed after so long."""
OVERHEAD_BYTES: Final = 64
"""Most bytes that encryption adds to a frame."""
CONNECT_TIMEOUT_MS: Final = 2000
"""Of one try to connect. By itself the kernel decides, and may wait for as long again as the network was cut."""
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 10, 5, 4
"""An idle connection to a host that has vanished ends after 30 s; by itself the kernel takes two hours."""
UNACKNOWLEDGED_MS: Final = 60_000
"""Longest wait for the other side to take bytes; by itself the kernel takes a quarter of an hour. Peers may well read
slowly, or pause: longer than a step of a handoff."""
_DOMAIN: Final = "triptych"


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
    _authenticator: AsyncioAuthenticator | None = None

    def __init__(self, key: ClusterKey | None = None) -> None:
        """Derive both key pairs. Without a key, sockets are plain."""
        super().__init__()
        self.max_sockets = 16_384  # libzmq's 1023 are too few: a proxy has three for each worker
        if key is not None:
            self.server, self.client = KeyPair.of(key, "curve server"), KeyPair.of(key, "curve client")

    def authenticate(self) -> None:
        """Begin to answer libzmq's questions about new peers; needs a running loop. Only the first call counts."""
        if self._authenticator is None and self.client is not None:
            self._authenticator = AsyncioAuthenticator(self)
            self._authenticator.configure_curve_callback(_DOMAIN, self)
            self._authenticator.start()

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether `key` is the members' public key; named by pyzmq."""
        return self.client is not None and key == self.client.public

    def destroy(self, linger: int | None = None) -> None:
        """Close every socket, and end."""
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        super().destroy(linger)


def secure_bind(socket: zmq.Socket[Any], host: str) -> str:
    """Bind a free port on `host`, for members of the cluster only; return the address.

    Call on the loop. Without a key the socket stays plain.
    """
    _limit_waits(socket)
    context = socket.context
    if isinstance(context, ClusterContext) and context.server is not None:
        context.authenticate()
        socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # were nobody at the door, nobody would come in
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, context.server.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, context.server.secret)
    socket.bind(f"tcp://{host}:*")
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))


def secure_connect(socket: zmq.Socket[Any], address: str) -> None:
    """Connect to a member of the cluster. Without a key the socket stays plain."""
    _limit_waits(socket)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
    socket.setsockopt(zmq.TCP_MAXRT, UNACKNOWLEDGED_MS)
    context = socket.context
    if isinstance(context, ClusterContext) and context.server is not None and context.client is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, context.server.public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, context.client.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, context.client.secret)
    socket.connect(address)


def _limit_waits(socket: zmq.Socket[Any]) -> None:
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_INTERVAL_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_PROBES)
