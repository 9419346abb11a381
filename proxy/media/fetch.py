"""Downloads of untrusted media URLs: bounded in size and time, and never from the server's own network.

Each hop is connected to by an address that was looked up and checked inside the connect call (`_CheckedNetwork`). A
name therefore cannot change between check and connection (DNS rebinding). Redirects are followed here, hop by hop.
"""

# ruff: noqa: ASYNC109 (the signatures of networks and streams are httpcore's)

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import httpcore
import httpx

from common.config import Settings
from common.errors import TriptychError, invalid, words_of
from common.http.connections import ChunkGuard
from proxy.media.addresses import AddressResolver
from proxy.media.fair_semaphore import FairSemaphore, Share

MAX_REDIRECTS: Final = 5
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_SLOTS: Final = 64
"""Fetches at once. Each slot has a connection and a resolver thread: a fetch with a slot waits for no other fetch."""
_SLOT_GRACE_S: Final = 1.0
"""Patience for a slot beyond the duration of a fetch. By then every slot has been free once, except slots of names that
are still being looked up."""
_FIRST_READ_BYTES: Final = 2 * 2**10
_MAX_READ_BYTES: Final = 32 * 2**10
"""Limits of a read, growing with the data received: endless heads cost more to parse than data."""
_FRAMING_BYTES: Final = 32 * 2**10
"""Allowance for heads, chunk sizes and trailers; an eighth of the data is allowed on top."""
_CHUNKS_PER_TURN: Final = 16
_HEADERS: Final = ((b"Accept", b"*/*"), (b"Accept-Encoding", b"identity"), (b"User-Agent", b"triptych"))


class Fetcher:
    """Downloader for the media of all requests. Close it.

    Refused are user names in URLs, and addresses beyond the open internet (see `proxy.media.addresses`), whatever
    notation, name or redirect leads there. No cookie is kept and no proxy of the environment used: a proxy would
    resolve names unchecked.
    """

    def __init__(self, settings: Settings) -> None:
        self._timeout_s = settings.media_timeout_s
        self._schemes = [scheme for scheme in settings.allowed_media_schemes if scheme in ("http", "https")]
        self._tls = httpx.create_ssl_context(trust_env=False)
        self._resolver = AddressResolver(_SLOTS, allow_private=settings.allow_private_media_urls)
        self.slots = FairSemaphore(_SLOTS, settings.media_timeout_s + _SLOT_GRACE_S)

    def close(self) -> None:
        self._resolver.close()

    async def fetch(
        self,
        url: str,
        param: str,
        max_bytes: int,
        reserve: Callable[[int], None] = lambda _: None,
        share: Share | None = None,
    ) -> bytes:
        """Return the body of `url`, for the request that owns `share`; `reserve(n)` runs before n bytes are held.

        The time limit starts with the slot. Raises TriptychError naming `param`: "invalid_request" for a forbidden
        URL, "bad_media" for anything but a 200 in time, "item_too_large" for more than `max_bytes`. Raises SlotTimeout
        where other requests hold all slots, and passes on errors of `reserve`.
        """
        share = share or Share(self.slots)
        async with share.slot():
            try:
                async with asyncio.timeout(self._timeout_s) as limit:
                    network = _CheckedNetwork(self._resolver, param, share, limit.when() or 0.0)
                    async with httpcore.AsyncConnectionPool(
                        self._tls, max_keepalive_connections=0, network_backend=network
                    ) as pool:
                        for _ in range(MAX_REDIRECTS + 1):
                            target = self._parse(url, param)
                            data, location = await _request(pool, target, param, max_bytes, reserve)
                            if location is None:
                                return data
                            url = _redirected(target, location, param)
            except TimeoutError:
                raise _bad(param, f"{_shown(url)} took longer than {self._timeout_s:g} s") from None
            except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, ssl.SSLError) as error:
                raise _bad(param, f"{_shown(url)} cannot be fetched: {words_of(error)}") from error
        raise _bad(param, f"more than {MAX_REDIRECTS} redirects, the last to {_shown(url)}")

    def _parse(self, url: str, param: str) -> httpx.URL:
        try:
            parsed = httpx.URL(url)
        except (httpx.InvalidURL, ValueError) as error:
            raise _bad(param, f"{_shown(url)} cannot be fetched: {error}") from error
        if parsed.scheme not in self._schemes or not parsed.raw_host:
            fault = f"{_shown(url)} is not a URL of {' or '.join(self._schemes)}"
        elif parsed.userinfo:
            fault = "a URL with a user name or password is not fetched"
        elif parsed.port is not None and not 0 < parsed.port < 2**16:
            fault = f"{_shown(url)} has a port that there is not"
        else:
            return parsed
        raise invalid(f"{param}: {fault}", param)


@dataclass(eq=False, repr=False)
class _CheckedNetwork(httpcore.AsyncNetworkBackend):
    """Network of one fetch. Names are resolved and checked here, and connected to by the checked addresses."""

    _resolver: AddressResolver
    _param: str
    _share: Share
    _ends_s: float  # by the loop's clock
    _tcp: httpcore.AsyncNetworkBackend = field(default_factory=httpcore.AnyIOBackend)

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to the first address that accepts; each has an equal share of the remaining time."""
        addresses = await self._resolver.resolve(host, port, self._param, self._share)
        failure: Exception = httpcore.ConnectError(f"{host} has no address")
        for number, address in enumerate(addresses):
            left_s = max(0.0, self._ends_s - asyncio.get_running_loop().time())
            share_s = left_s / (len(addresses) - number)
            try:
                return _BoundedStream(await self._tcp.connect_tcp(address, port, share_s))
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure


@dataclass(eq=False, repr=False)
class _BoundedStream(httpcore.AsyncNetworkStream):
    """Connection to a media server, with a bound on bytes beside the data.

    httpcore parses all received bytes in one go, and skips informational heads ("103 Early Hints") without end.
    """

    _stream: httpcore.AsyncNetworkStream
    _num_read: int = 0
    _num_data: int = 0
    _num_chunks: int = 0
    _guard: ChunkGuard = field(default_factory=ChunkGuard)

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        return _BoundedStream(await self._stream.start_tls(ssl_context, server_hostname, timeout))

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Read a bounded amount. All bytes of earlier reads have been parsed by now."""
        if self._num_read - self._num_data > _FRAMING_BYTES + self._num_data // 8:
            raise httpcore.RemoteProtocolError("it sends too much that is no data")
        size = min(max_bytes, _MAX_READ_BYTES, max(_FIRST_READ_BYTES, self._num_data))
        data = await self._stream.read(size, timeout)
        self._num_read += len(data)
        return data

    async def count(self, chunk: bytes) -> None:
        """Count a part of the body (an HTTP chunk or a read); other tasks run now and then."""
        self._num_data += len(chunk)
        if self._guard.are_too_many(len(chunk)):
            raise httpcore.RemoteProtocolError("it sends its data in too many tiny pieces")
        self._num_chunks += 1
        if self._num_chunks % _CHUNKS_PER_TURN == 0:
            await asyncio.sleep(0)


async def _request(
    pool: httpcore.AsyncConnectionPool, url: httpx.URL, param: str, max_bytes: int, reserve: Callable[[int], None]
) -> tuple[bytes, str | None]:
    """Ask for one hop. Return the body, or the location of a redirect."""
    # `url.host` would decode "xn--", and by newer rules than the resolver encodes: another name might result.
    target = httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
    async with pool.stream("GET", target, headers=[(b"Host", url.netloc), *_HEADERS]) as response:
        headers = httpx.Headers(response.headers)
        if response.status in _REDIRECTS and "location" in headers:
            return b"", headers["location"]
        if response.status != 200:
            raise _bad(param, f"{_shown(str(url))} answered {response.status}")
        text = headers.get("content-length", "")
        declared = int(text) if text.isdecimal() else 0
        if declared > max_bytes:
            raise _over(param, f"{declared} bytes", max_bytes)
        reserve(declared)
        body, stream = bytearray(), response.extensions["network_stream"]
        async for chunk in response.aiter_stream():
            await stream.count(chunk)
            reserve(max(0, len(body) + len(chunk) - max(declared, len(body))))
            body += chunk
            if len(body) > max_bytes:
                raise _over(param, f"over {max_bytes} bytes", max_bytes)
        return bytes(body), None


def _redirected(url: httpx.URL, location: str, param: str) -> str:
    """Return the target of a redirect. A redirect from https to plain http is refused."""
    try:
        there = url.join(location)
    except (httpx.InvalidURL, ValueError) as error:
        raise _bad(param, f"{_shown(str(url))} redirects to what is no URL: {error}") from error
    if url.scheme == "https" and there.scheme == "http":
        raise invalid(f"{param}: {_shown(str(url))} redirects from https to http, which is not followed", param)
    return str(there)


def _bad(param: str, message: str) -> TriptychError:
    return TriptychError("bad_media", f"{param}: {message}", param)


def _over(param: str, size: str, limit_bytes: int) -> TriptychError:
    message = f"{param}: the file has {size}, at most {limit_bytes} are allowed"
    return TriptychError("item_too_large", message, param)


def _shown(url: str) -> str:
    """Return a URL without the query: a query may hold a secret."""
    shown = url.partition("?")[0]
    return shown if len(shown) <= 120 else shown[:117] + "..."
