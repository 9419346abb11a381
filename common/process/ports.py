"""Ports that this machine can listen on."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
from pathlib import Path
from typing import Final

from common.errors import invalid

_EPHEMERAL: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT: Final = 10_000
"""Below lie the ports of most known services."""


def reserve_port(host: str, port: int, option: str = "--port") -> int:
    """Return the port, or a free port for 0, after a check that the address can be bound.

    Raises TriptychError("invalid_request") naming the `option` where it cannot.
    """
    try:
        return _bound(host, port) if port else free_port(host)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        is_foreign = error.errno == errno.EADDRNOTAVAIL
        remedy = "give an address of this machine" if is_foreign else f"choose another {option}, or 0 for a free one"
        message = f"cannot listen on {host}:{port}: {reason.lower()}; {remedy}"
        raise invalid(message, "host" if is_foreign else "port") from error


def free_port(host: str) -> int:
    """Return a free port below the range that the kernel gives away: still free when a server starts, and starts again.

    Raises OSError where no port of the host can be bound.
    """
    try:
        lowest_given = int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        lowest_given = 0
    below = range(_LOWEST_PORT, lowest_given)
    for port in random.sample(below, min(20, len(below))):
        with contextlib.suppress(OSError):
            return _bound(host, port)
    return _bound(host, 0)


def _bound(host: str, port: int) -> int:
    """Return the port, or any free port for 0. Raises OSError if the port is taken."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
        probe.bind(address)
        return int(probe.getsockname()[1])
