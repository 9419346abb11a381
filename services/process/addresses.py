"""Addresses to bind to, and addresses to tell others."""

from __future__ import annotations

import resource
import socket
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from common.errors import TriptychError
from common.telemetry import get_logger

FEW_DESCRIPTORS: Final = 16_384
"""Fewer can be taken at once by one other host that opens connections and says nothing: it has some 28,000 ports."""

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


def warn_of_few_descriptors(host: str) -> None:
    """Say it where others could take all descriptors of a worker that listens on `host`, a numeric address.

    ZMQ does not limit how many connections are in their handshake: nobody gets in while they hold all there are, and
    its thread is busy trying. Call it once the process's limit has been raised.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < FEW_DESCRIPTORS and not ip_address(host).is_loopback:
        message = "whoever reaches this host can keep others out for a while: allow this process more descriptors"
        log.warning(message, host=host, limit=limit, wanted=FEW_DESCRIPTORS, setting="ulimit -n")


def advertised(endpoint: str, advertise_host: str | None) -> str:
    """A bound endpoint as others reach it: with `advertise_host` if given, else with this host's name for 0.0.0.0."""
    if not endpoint:
        return ""
    parts = urlsplit(endpoint)
    host = advertise_host or (socket.gethostname() if parts.hostname in ("0.0.0.0", "::") else None)
    if host is None:
        return endpoint
    return urlunsplit(parts._replace(netloc=f"{host}:{parts.port}"))
