"""Addresses to bind to, and addresses to tell others."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit, urlunsplit

from common.errors import TriptychError


def resolve_host(host: str) -> str:
    """A numeric IPv4 address to bind to. Raises TriptychError("invalid_request") where the name has none here."""
    try:
        return str(socket.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        message = f"cannot listen on host {host!r}: {error}; give an IPv4 address or a name of this machine"
        raise TriptychError("invalid_request", message, "host") from error


def advertised(endpoint: str, advertise_host: str | None) -> str:
    """A bound endpoint as others reach it: with `advertise_host` if given, else with this host's name for 0.0.0.0."""
    if not endpoint:
        return ""
    parts = urlsplit(endpoint)
    host = advertise_host or (socket.gethostname() if parts.hostname in ("0.0.0.0", "::") else None)
    if host is None:
        return endpoint
    return urlunsplit(parts._replace(netloc=f"{host}:{parts.port}"))
