"""Addresses of media hosts: looked up, and refused unless they are on the open internet.

`allow_private_media_urls` admits private networks and loopback as well. Link-local, multicast and reserved addresses
and the metadata services of clouds are refused in any case, also inside IPv6 forms that carry an IPv4 address.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from common.errors import TriptychError, invalid
from proxy.media.fair_semaphore import Share

_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")
_ASSIGNED: Final = ipaddress.ip_network("2000::/3")
"""The routed part of the IPv6 internet."""
_PRIVATE: Final = tuple(
    ipaddress.ip_network(network)
    for network in (
        "127.0.0.0/8",
        "10.0.0.0/8",  # RFC 1918, as the next two
        "172.16.0.0/12",
        "192.168.0.0/16",
        "100.64.0.0/10",  # RFC 6598: carriers, and overlay networks
        "::1/128",
        "fc00::/7",  # RFC 4193
    )
)
"""Opened by `allow_private_media_urls`. Link-local addresses (169.254.0.0/16, fe80::/10) stay closed: most clouds have
their metadata services there, and no media."""
_METADATA: Final = tuple(
    ipaddress.ip_network(network)
    for network in (
        "168.63.129.16/32",  # Azure: learn.microsoft.com/azure/virtual-network/what-is-ip-address-168-63-129-16
        "192.0.0.0/24",  # reserved by RFC 6890, unknown to some Pythons; Oracle Cloud Classic has 192.0.0.192
        "100.100.100.200/32",  # Alibaba Cloud: docs.cloud-init.io, data source AliYun
        "fd00:100::100:200/128",  # the same
        "fd00:ec2::/32",  # AWS, ::254 and EKS's ::23: docs.aws.amazon.com, Instance Metadata Service
        "fd20:ce::254/128",  # Google Cloud: cloud.google.com/compute/docs/metadata
        "fd00:c1::a9fe:a9fe/128",  # Oracle Cloud: github.com/oracle/oci-python-sdk
        "fd00:42::42/128",  # Scaleway: docs.cloud-init.io, data source Scaleway
        "fd00:a9fe:a9fe::1/128",  # Akamai: docs.cloud-init.io, data source Akamai
    )
)
"""Metadata services of clouds at other addresses, some of which look public or private."""
_MAX_ADDRESSES: Final = 4
"""Tried per name: an untrusted name server may return thousands, of hosts that belong to others."""


class AddressResolver:
    """Resolver with threads of its own: the loop's default threads stay free for tokenisation."""

    def __init__(self, num_threads: int, *, allow_private: bool) -> None:
        self._threads = ThreadPoolExecutor(num_threads, "resolver")
        self._allow_private = allow_private

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def resolve(self, host: str, port: int, param: str, share: Share) -> list[str]:
        """Return at most _MAX_ADDRESSES addresses in the resolver's order, after checking every address of the name.

        A look-up cannot be interrupted. On cancellation `share` keeps a slot until the thread is free again.
        Raises TriptychError naming `param`: "bad_media" for an unknown host, "invalid_request" for a forbidden address.
        """
        look_up = functools.partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        found = asyncio.get_running_loop().run_in_executor(self._threads, look_up)
        try:
            addresses = list(dict.fromkeys(str(entry[4][0]) for entry in await asyncio.shield(found)))
        except asyncio.CancelledError:
            share.keep_for(found)
            raise
        except (OSError, UnicodeError) as error:
            raise TriptychError("bad_media", f"{param}: the host {host!r} is not known: {error}", param) from error
        for address in addresses:
            if is_public(address) or (self._allow_private and is_private(address)):
                continue
            where = "at a reserved address" if self._allow_private else "in a private network"
            remedy = " without --allow-private-media-urls" if is_private(address) else ""
            raise invalid(f"the host {host!r} is {where} ({address}), which is not allowed{remedy}", param)
        return addresses[:_MAX_ADDRESSES]


def is_public(address: str) -> bool:
    """Return whether an address is on the open internet; an IPv4 address inside an IPv6 form decides."""
    ip = _innermost(address)
    if _is_metadata(ip) or (isinstance(ip, ipaddress.IPv6Address) and ip not in _ASSIGNED):
        return False
    return ip.is_global and not ip.is_multicast


def is_private(address: str) -> bool:
    """Return whether an address is loopback or in a private network, and no metadata service."""
    ip = _innermost(address)
    return any(ip in network for network in _PRIVATE) and not _is_metadata(ip)


def _is_metadata(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return any(ip in network for network in _METADATA)


def _innermost(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the IPv4 address inside an IPv6 address, or the given address."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv4Address):
        return ip
    inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
    if inner is None and ip in _NAT64:
        inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    return ip if inner is None else inner
