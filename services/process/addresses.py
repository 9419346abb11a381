"""Addresses to bind to, and addresses to give to others."""

from __future__ import annotations

import resource
import socket
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from broker.cluster.registry import reachable_host
from common.config import Settings
from common.errors import TriptychError
from common.telemetry import get_logger

FEW_DESCRIPTORS: Final = 16_384
"""Another host, with 28,000 ports, can occupy as many descriptors at once by silent connections."""

log = get_logger()


def resolve_host(host: str) -> str:
    """Return a numeric IPv4 address to bind to. Raises TriptychError("invalid_request") for an unknown name."""
    try:
        return str(socket.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        message = f"cannot listen on host {host!r}: {error}; give an IPv4 address or a name of this machine"
        raise TriptychError("invalid_request", message, "host") from error


def warn_of_open_host(host: str, *, has_key: bool) -> None:
    """Warn of a worker on `host`, a numeric address, open to any client of this machine."""
    if not has_key and not ip_address(host).is_loopback:
        message = "anybody who reaches this host can use this worker: give all of the cluster one --cluster-key-file"
        log.warning(message, host=host, setting="cluster_key_file")


def warn_of_few_descriptors(host: str) -> None:
    """Warn if other hosts could take all descriptors of a worker on `host`, a numeric address.

    ZMQ does not limit connections in a handshake. To be called once the limit of the process has been raised.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < FEW_DESCRIPTORS and not ip_address(host).is_loopback:
        message = "whoever reaches this host can keep others out for a while: allow this process more descriptors"
        log.warning(message, host=host, limit=limit, wanted=FEW_DESCRIPTORS, setting="ulimit -n")


def advertised(endpoint: str, settings: Settings) -> str:
    """Return a bound endpoint for others."""
    if not endpoint:
        return ""
    parts = urlsplit(endpoint)
    bound = parts.hostname or ""
    host = reachable_host(bound, settings)
    return endpoint if host == bound else urlunsplit(parts._replace(netloc=f"{host}:{parts.port}"))
