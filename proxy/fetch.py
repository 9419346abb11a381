"""Downloads of media URLs that a stranger gave us: bounded in size and time, and never into our own network.

Each hop is resolved here, checked, and then connected to by the address that was checked, so that a name cannot
change its mind between the check and the connection (DNS rebinding). Redirects are followed by hand for that reason.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import httpx

from common.config import Settings
from common.errors import TriptychError

MAX_REDIRECTS: Final = 5
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")
_ASSIGNED: Final = ipaddress.ip_network("2000::/3")
"""All that is routed on the IPv6 internet."""
_RESOLVERS: Final = 16
"""Names that are looked up at once: each may take its server's time, and nobody else's."""


class Fetcher:
    """One HTTP client for all media. Close it.

    What is refused: addresses beyond the open internet (private, loopback, link-local and with it the metadata services
    of clouds, multicast, those that carry such an IPv4 address), whatever notation or name leads there, and user names
    in URLs. Every redirect is looked at anew.
    """

    def __init__(self, settings: Settings) -> None:
        self._timeout_s = settings.media_timeout_s
        self._schemes = [scheme for scheme in settings.allowed_media_schemes if scheme in ("http", "https")]
        self._allow_private = settings.allow_private_media_urls
        self._resolvers = ThreadPoolExecutor(_RESOLVERS, "resolver")  # the loop's own threads are for everybody's text
        self._client = httpx.AsyncClient(
            follow_redirects=False,
            trust_env=False,  # a proxy from the environment would resolve names for us, unchecked
            timeout=httpx.Timeout(settings.media_timeout_s),
            limits=httpx.Limits(max_connections=64, max_keepalive_connections=0),
            headers={"Accept-Encoding": "identity", "User-Agent": "triptych"},
        )

    async def close(self) -> None:
        self._resolvers.shutdown(wait=False, cancel_futures=True)
        await self._client.aclose()

    async def fetch(self, url: str, param: str, max_bytes: int, take: Callable[[int], None] = lambda _: None) -> bytes:
        """The body of `url`. `take` is told of bytes before they are held, and may raise.

        Raises TriptychError naming `param`: "invalid_request" for a URL that is not allowed, "bad_media" for one
        that does not answer with 200 in time, "item_too_large" for more than `max_bytes`.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                for _ in range(MAX_REDIRECTS + 1):
                    target = self._parse(url, param)
                    address = await self._checked_address(target, param)
                    data, location = await self._get(target, address, param, max_bytes, take)
                    if location is None:
                        return data
                    url = _redirected(target, location, param)
        except TimeoutError:
            raise _bad(param, f"{_shown(url)} took longer than {self._timeout_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _bad(param, f"{_shown(url)} cannot be fetched: {error or type(error).__name__}") from error
        raise _bad(param, f"more than {MAX_REDIRECTS} redirects, the last to {_shown(url)}")

    def _parse(self, url: str, param: str) -> httpx.URL:
        parsed = httpx.URL(url)
        if parsed.scheme not in self._schemes or not parsed.host:
            what = f"{_shown(url)} is not a URL of {' or '.join(self._schemes)}"
        elif parsed.userinfo:
            what = "a URL with a user name or password is not fetched"
        else:
            return parsed
        raise TriptychError("invalid_request", f"{param}: {what}", param)

    async def _get(
        self, url: httpx.URL, address: str, param: str, max_bytes: int, take: Callable[[int], None]
    ) -> tuple[bytes, str | None]:
        """One hop: the body, or where it redirects to."""
        request = self._client.build_request(
            "GET",
            url.copy_with(host=address),
            headers={"Host": url.netloc.decode("ascii")},
            extensions={"sni_hostname": url.host},
        )
        response = await self._client.send(request, stream=True)
        try:
            if response.status_code in _REDIRECTS and "location" in response.headers:
                return b"", response.headers["location"]
            if response.status_code != 200:
                raise _bad(param, f"{_shown(str(url))} answered {response.status_code}")
            return await _read(response, param, max_bytes, take), None
        finally:
            await response.aclose()

    async def _checked_address(self, url: httpx.URL, param: str) -> str:
        """One address of the host; every one of them must be allowed."""
        port = url.port or (443 if url.scheme == "https" else 80)
        try:
            look_up = functools.partial(socket.getaddrinfo, url.host, port, type=socket.SOCK_STREAM)
            found = await asyncio.get_running_loop().run_in_executor(self._resolvers, look_up)
        except (OSError, UnicodeError) as error:
            raise _bad(param, f"the host {url.host!r} is not known: {error}") from error
        addresses = [str(entry[4][0]) for entry in found]
        for address in addresses:
            if not self._allow_private and not is_public(address):
                message = f"the host {url.host!r} is in a private network ({address}), which is not allowed"
                raise TriptychError("invalid_request", message, param)
        return addresses[0]


def is_public(address: str) -> bool:
    """True for an address on the open internet; also looks into IPv6 forms that carry an IPv4 address."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is None and ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            ip = inner
        elif ip not in _ASSIGNED:
            return False
    return ip.is_global and not ip.is_multicast


async def _read(response: httpx.Response, param: str, max_bytes: int, take: Callable[[int], None]) -> bytes:
    text = response.headers.get("content-length", "")
    declared = int(text) if text.isdecimal() else 0
    if declared > max_bytes:
        raise _over(param, f"{declared} bytes", max_bytes)
    take(declared)
    body = bytearray()
    async for chunk in response.aiter_raw():
        take(max(0, len(body) + len(chunk) - max(declared, len(body))))
        body += chunk
        if len(body) > max_bytes:
            raise _over(param, f"over {max_bytes} bytes", max_bytes)
    return bytes(body)


def _redirected(url: httpx.URL, location: str, param: str) -> str:
    """Where a redirect leads. Who asks for https gets nothing that came by plain http."""
    there = url.join(location)
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
