"""Addresses to bind to, and addresses to tell others."""

from __future__ import annotations

import socket
from ipaddress import ip_address
from urllib.parse import urlsplit, urlunsplit

from common.errors import TriptychError
from common.telemetry import get_logger

log = get_logger()


def resolve_host(host: str) -> str:
    """A numeric IPv4 address to bind to. Raises TriptychError("invalid_request") where the name has none here."""
    try:
        return str(socket.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        message = f"cannot listen on host {host!r}: {error}; give an IPv4 address or a name of this machine"
        raise TriptychError("invalid_request", message, "host") from error


def warn_of_strangers(host: str, *, has_key: bool) -> None:
    """Say it where anybody who reaches this machine can use a worker that listens on `host`, a numeric address."""
    if not has_key and not ip_address(host).is_loopback:
        message = "anybody who reaches this host can use this worker: give all of the cluster one --cluster-key-file"
        log.warning(message, host=host, setting="cluster_key_file")


def advertised(endpoint: str, advertise_host: str | None) -> str:
    """A bound endpoint as others reach it: with `advertise_host` if given, else with this host's name for 0.0.0.0."""
    if not endpoint:
        return ""
    parts = urlsplit(endpoint)
    host = advertise_host or (socket.gethostname() if parts.hostname in ("0.0.0.0", "::") else None)
    if host is None:
        return endpoint
    return urlunsplit(parts._replace(netloc=f"{host}:{parts.port}"))
