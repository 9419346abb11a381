"""Downloads of media URLs that a stranger gave us: bounded in size and time, and never into our own network.

Each hop is resolved here, checked, and then connected to by the address that was checked, so that a name cannot
change its mind between the check and the connection (DNS rebinding). Redirects are followed by hand for that reason.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, Final

import httpx

from common.config import Settings
from common.errors import TriptychError
from common.http.chunk_guard import ChunkGuard
from proxy.media.fair_semaphore import FairSemaphore, Share

MAX_REDIRECTS: Final = 5
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")
_ASSIGNED: Final = ipaddress.ip_network("2000::/3")
"""All that is routed on the IPv6 internet."""
_PRIVATE: Final = tuple(
    ipaddress.ip_network(network)
    for network in (
        "127.0.0.0/8",
        "10.0.0.0/8",  # RFC 1918, as the next two
        "172.16.0.0/12",
        "192.168.0.0/16",
        "100.64.0.0/10",  # RFC 6598: carriers, and networks laid over others
        "::1/128",
        "fc00::/7",  # RFC 4193
    )
)
"""What `allow_private_media_urls` opens. Not link-local addresses (169.254.0.0/16, fe80::/10), where clouds have most
of their metadata services: nobody keeps pictures there."""
_METADATA: Final = tuple(
    ipaddress.ip_network(network)
    for network in (
        "168.63.129.16/32",  # Azure: learn.microsoft.com/azure/virtual-network/what-is-ip-address-168-63-129-16
        "192.0.0.0/24",  # reserved by RFC 6890, which not every Python knows; Oracle Cloud Classic has 192.0.0.192
        "100.100.100.200/32",  # Alibaba Cloud: docs.cloud-init.io, data source AliYun
        "fd00:100::100:200/128",  # the same
        "fd00:ec2::/32",  # AWS, ::254 and EKS's ::23: docs.aws.amazon.com, Instance Metadata Service
        "fd20:ce::254/128",  # Google Cloud: cloud.google.com/compute/docs/metadata
        "fd00:c1::a9fe:a9fe/128",  # Oracle Cloud: github.com/oracle/oci-python-sdk
        "fd00:42::42/128",  # Scaleway: docs.cloud-init.io, data source Scaleway
        "fd00:a9fe:a9fe::1/128",  # Akamai: docs.cloud-init.io, data source Akamai
    )
)
"""Metadata services of clouds at other addresses, some of which look public or private. Refused in any case."""
_MAX_ADDRESSES: Final = 4
"""So many addresses of a name are tried: a stranger's name server may give thousands, to hosts that are not its own."""
_PLACES: Final = 64
"""Fetches at once. Each has a connection, and a thread in which its name is looked up, so that it waits for nobody else
once it has its place."""
_PLACE_GRACE_S: Final = 1.0
"""A place is waited for as long as a fetch may take, and this: by then every one has been free once, but for those of
names that are still being looked up."""
_FIRST_READ_BYTES: Final = 2 * 2**10
_MAX_READ_BYTES: Final = 32 * 2**10
"""So much is read and parsed at a time, more as more data have come: heads without end cost more to parse."""
_FRAMING_BYTES: Final = 32 * 2**10
"""What may come beside the data: heads, sizes of chunks, trailers; and an eighth of the data."""
_PIECES_PER_TURN: Final = 16


class Fetcher:
    """One HTTP client for all media. Close it.

    What is refused: addresses beyond the open internet (private, loopback, link-local and with it the metadata services
    of clouds, multicast, those that carry such an IPv4 address), whatever notation or name leads there, and user names
    in URLs. Every redirect is looked at anew. With `allow_private_media_urls` private networks and loopback are not
    refused; everything else of this is.
    """

    def __init__(self, settings: Settings) -> None:
        self._timeout_s = settings.media_timeout_s
        self._schemes = [scheme for scheme in settings.allowed_media_schemes if scheme in ("http", "https")]
        self._allow_private = settings.allow_private_media_urls
        self._places = FairSemaphore(_PLACES, settings.media_timeout_s + _PLACE_GRACE_S)
        self._resolvers = ThreadPoolExecutor(_PLACES, "resolver")  # the loop's own threads are for everybody's text
        self._client = httpx.AsyncClient(
            follow_redirects=False,
            trust_env=False,  # a proxy from the environment would resolve names for us, unchecked
            timeout=httpx.Timeout(settings.media_timeout_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),  # there are places
            headers={"Accept-Encoding": "identity", "User-Agent": "triptych"},
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),  # none: hosts that share an address shared them
        )

    async def close(self) -> None:
        self._resolvers.shutdown(wait=False, cancel_futures=True)
        await self._client.aclose()

    def share(self) -> Share:
        """What one request has of the places in which media are fetched."""
        return self._places.share()

    async def fetch(
        self,
        url: str,
        param: str,
        max_bytes: int,
        take: Callable[[int], None] = lambda _: None,
        share: Share | None = None,
    ) -> bytes:
        """The body of `url`, for the request that has `share`. `take` is told of bytes before they are held, and may
        raise.

        Its time begins with its place. Raises TriptychError naming `param`: "invalid_request" for a URL that is not
        allowed, "bad_media" for one that does not answer with 200 in time, "item_too_large" for more than `max_bytes`;
        and NoPlace where others have all places.
        """
        share = share or self.share()
        async with share.place():
            return await self._fetch(url, param, max_bytes, take, share)

    async def _fetch(self, url: str, param: str, max_bytes: int, take: Callable[[int], None], share: Share) -> bytes:
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                for _ in range(MAX_REDIRECTS + 1):
                    target = self._parse(url, param)
                    addresses = await self._checked_addresses(target, param, share)
                    wire = _Wire()
                    response = await self._ask(target, addresses, limit.when() or 0.0, wire)
                    data, location = await self._answer(response, wire, target, param, max_bytes, take)
                    if location is None:
                        return data
                    url = _redirected(target, location, param)
        except TimeoutError:
            raise _bad(param, f"{_shown(url)} took longer than {self._timeout_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError) as error:
            raise _bad(param, f"{_shown(url)} cannot be fetched: {error or type(error).__name__}") from error
        raise _bad(param, f"more than {MAX_REDIRECTS} redirects, the last to {_shown(url)}")

    def _parse(self, url: str, param: str) -> httpx.URL:
        parsed = _read_url(url, param)
        if parsed.scheme not in self._schemes or not parsed.raw_host:
            what = f"{_shown(url)} is not a URL of {' or '.join(self._schemes)}"
        elif parsed.userinfo:
            what = "a URL with a user name or password is not fetched"
        elif parsed.port is not None and not 0 < parsed.port < 2**16:
            what = f"{_shown(url)} has a port that there is not"
        else:
            return parsed
        raise TriptychError("invalid_request", f"{param}: {what}", param)

    async def _ask(self, url: httpx.URL, addresses: list[str], ends_s: float, wire: _Wire) -> httpx.Response:
        """The head of what the first of these addresses answers that can be connected to. Close it.

        Each has an equal share of the time that is left until `ends_s`, by the loop's clock, to be connected to.
        """
        for number, address in enumerate(addresses, 1):
            left_s = max(0.0, ends_s - asyncio.get_running_loop().time())
            request = self._client.build_request(
                "GET",
                url.copy_with(host=address),
                headers={"Host": url.netloc.decode("ascii")},
                extensions={"sni_hostname": _host(url), "trace": wire.watch},
                timeout=httpx.Timeout(self._timeout_s, connect=left_s / (len(addresses) - number + 1)),
            )
            try:
                return await self._client.send(request, stream=True)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                if number == len(addresses):
                    raise
            except ValueError as error:  # httpx reads where a redirect leads, and does not expect all that there may be
                raise httpx.RemoteProtocolError(f"it redirects to what is no URL: {error}") from error
        raise AssertionError("a known host has an address")

    async def _answer(
        self,
        response: httpx.Response,
        wire: _Wire,
        url: httpx.URL,
        param: str,
        max_bytes: int,
        take: Callable[[int], None],
    ) -> tuple[bytes, str | None]:
        """Of one hop: the body, or where it redirects to."""
        try:
            if response.status_code in _REDIRECTS and "location" in response.headers:
                return b"", response.headers["location"]
            if response.status_code != 200:
                raise _bad(param, f"{_shown(str(url))} answered {response.status_code}")
            return await _read(response, wire, param, max_bytes, take), None
        finally:
            await response.aclose()

    async def _checked_addresses(self, url: httpx.URL, param: str, share: Share) -> list[str]:
        """Addresses of the host in the resolver's order, _MAX_ADDRESSES at most; every one that it has is allowed."""
        host, port = _host(url), url.port or (443 if url.scheme == "https" else 80)
        try:
            found = await self._look_up(host, port, share)
        except (OSError, UnicodeError) as error:
            raise _bad(param, f"the host {host!r} is not known: {error}") from error
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        for address in addresses:
            if is_public(address) or (self._allow_private and is_private(address)):
                continue
            where = "at a reserved address" if self._allow_private else "in a private network"
            message = f"the host {host!r} is {where} ({address}), which is not allowed"
            raise TriptychError("invalid_request", message, param)
        return addresses[:_MAX_ADDRESSES]

    async def _look_up(self, host: str, port: int, share: Share) -> list[tuple[Any, ...]]:
        """As `socket.getaddrinfo`. Nobody can end one that takes too long: until it ends by itself its thread is taken,
        and with that its place."""
        look_up = functools.partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        found = asyncio.get_running_loop().run_in_executor(self._resolvers, look_up)
        try:
            return await asyncio.shield(found)
        except asyncio.CancelledError:
            share.keep_for(found)
            raise


class _Wire:
    """What a server sends on one connection, of which little may be anything but data.

    httpx parses all that it has read before anybody else has a turn, and skips heads before the last one ("103 Early
    Hints") without end.
    """

    def __init__(self) -> None:
        self._num_read = 0
        self._num_data = 0
        self._num_pieces = 0
        self._pieces = ChunkGuard()

    async def watch(self, event: str, info: dict[str, Any]) -> None:
        """Told of all that the client does (httpcore's "trace"): from here on it reads through `_read`."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            stream = info["return_value"]
            stream.read = functools.partial(self._read, stream.read)

    async def _read(self, read: Callable[..., Awaitable[bytes]], max_bytes: int, **options: Any) -> bytes:
        """All that has been read before is parsed by now."""
        if self._num_read - self._num_data > _FRAMING_BYTES + self._num_data // 8:
            raise httpx.RemoteProtocolError("it sends too much that is no data")
        size = min(max_bytes, _MAX_READ_BYTES, max(_FIRST_READ_BYTES, self._num_data))
        data = await read(size, **options)
        self._num_read += len(data)
        return data

    async def count(self, piece: bytes) -> None:
        """A piece of the body, a chunk or what was read at once, has come."""
        self._num_data += len(piece)
        if self._pieces.are_too_many(len(piece)):
            raise httpx.RemoteProtocolError("it sends its data in too many tiny pieces")
        self._num_pieces += 1
        if self._num_pieces % _PIECES_PER_TURN == 0:
            await asyncio.sleep(0)


def is_public(address: str) -> bool:
    """True for an address on the open internet; also looks into IPv6 forms that carry an IPv4 address."""
    ip = _innermost(address)
    if _is_metadata(ip) or (isinstance(ip, ipaddress.IPv6Address) and ip not in _ASSIGNED):
        return False
    return ip.is_global and not ip.is_multicast


def is_private(address: str) -> bool:
    """True for loopback and addresses of private networks, as `is_public` looks at them; not for metadata services."""
    ip = _innermost(address)
    return any(ip in network for network in _PRIVATE) and not _is_metadata(ip)


def _is_metadata(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return any(ip in network for network in _METADATA)


def _innermost(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The IPv4 address that an IPv6 address carries, else the address itself."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv4Address):
        return ip
    inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
    if inner is None and ip in _NAT64:
        inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    return ip if inner is None else inner


async def _read(
    response: httpx.Response, wire: _Wire, param: str, max_bytes: int, take: Callable[[int], None]
) -> bytes:
    text = response.headers.get("content-length", "")
    declared = int(text) if text.isdecimal() else 0
    if declared > max_bytes:
        raise _over(param, f"{declared} bytes", max_bytes)
    take(declared)
    body = bytearray()
    async for chunk in response.aiter_raw():
        await wire.count(chunk)
        take(max(0, len(body) + len(chunk) - max(declared, len(body))))
        body += chunk
        if len(body) > max_bytes:
            raise _over(param, f"over {max_bytes} bytes", max_bytes)
    return bytes(body)


def _read_url(url: str, param: str) -> httpx.URL:
    try:
        return httpx.URL(url)
    except (httpx.InvalidURL, ValueError) as error:
        raise _bad(param, f"{_shown(url)} cannot be fetched: {error}") from error


def _host(url: httpx.URL) -> str:
    """As DNS has it. `url.host` decodes "xn--", which raises where there is nothing to decode, and by newer rules than
    those by which the resolver would encode it again: another name might come out."""
    return url.raw_host.decode("ascii")


def _redirected(url: httpx.URL, location: str, param: str) -> str:
    """Where a redirect leads. Who asks for https gets nothing that came by plain http."""
    try:
        there = url.join(location)
    except (httpx.InvalidURL, ValueError) as error:
        raise _bad(param, f"{_shown(str(url))} redirects to what is no URL: {error}") from error
    if url.scheme == "https" and there.scheme == "http":
        message = f"{param}: {_shown(str(url))} redirects from https to http, which is not followed"
        raise TriptychError("invalid_request", message, param)
    return str(there)


def _bad(param: str, message: str) -> TriptychError:
    return TriptychError("bad_media", f"{param}: {message}", param)


def _over(param: str, size: str, limit_bytes: int) -> TriptychError:
    message = f"{param}: the file has {size}, at most {limit_bytes} are allowed"
    return TriptychError("item_too_large", message, param)


def _shown(url: str) -> str:
    """A URL without its query, which may hold a secret."""
    shown = url.partition("?")[0]
    return shown if len(shown) <= 120 else shown[:117] + "..."
