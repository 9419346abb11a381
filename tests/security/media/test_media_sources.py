"""Where media may come from: no notation, name, redirect or link leads to what a stranger must not reach."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import trustme

from common.config import Settings
from common.errors import TriptychError
from proxy.media import addresses, fetch
from proxy.media.fetch import Fetcher
from proxy.media.local_files import read_local
from tests.proxy.media.test_media import web_server
from tests.proxy.sample_media import image_part, picture

INSIDE = (
    "127.0.0.1",
    "127.1",
    "2130706433",  # the same as one number
    "0x7f000001",
    "0177.0.0.1",  # octal
    "0",
    "0.0.0.0",
    "①②⑦.⓪.⓪.①",
    "localhost",
    "localhost.",
    "LOCALHOST",
    "10.0.0.1",
    "172.16.0.1",
    "192.168.1.1",
    "100.64.0.1",
    "198.18.0.1",
    "169.254.169.254",  # the metadata service of most clouds
    "0xa9fea9fe",
    "[::1]",
    "[::]",
    "[fd00:ec2::254]",  # that of AWS over IPv6
    "[fe80::1]",
    "[::ffff:169.254.169.254]",
    "[::ffff:a9fe:a9fe]",
    "[::127.0.0.1]",
    "[64:ff9b::169.254.169.254]",
    "[64:ff9b:1::a9fe:a9fe]",
    "[2002:a9fe:a9fe::]",
    "[fec0::1]",
    "168.63.129.16",  # Azure's platform, which only looks public
    "192.0.0.192",
    "224.0.0.1",
    "255.255.255.255",
)
NEVER = (
    "169.254.169.254",
    "0xa9fea9fe",
    "169.254.170.2",
    "168.63.129.16",
    "100.100.100.200",
    "0.0.0.0",
    "192.0.0.192",
    "224.0.0.1",
    "255.255.255.255",
    "[fe80::1]",
    "[fe80::a9fe:a9fe]",
    "[fec0::1]",
    "[ff02::1]",
    "[fd00:ec2::254]",
    "[fd00:ec2::23]",
    "[fd20:ce::254]",
    "[fd00:c1::a9fe:a9fe]",
    "[fd00:42::42]",
    "[fd00:a9fe:a9fe::1]",
    "[fd00:100::100:200]",
    "[::ffff:169.254.169.254]",
    "[::169.254.169.254]",
    "[64:ff9b::169.254.169.254]",
    "[64:ff9b::100.100.100.200]",
    "[64:ff9b:1::a9fe:a9fe]",
    "[2002:a9fe:a9fe::]",
)
"""Not even where private networks are allowed."""


async def fetched(url: str, **settings: Any) -> bytes:
    """Fetch up to 1000 bytes with a fetcher of these settings."""
    fetcher = Fetcher(Settings(**settings))
    try:
        return await fetcher.fetch(url, "image_url", 1000)
    finally:
        fetcher.close()


@pytest.mark.parametrize("host", INSIDE)
async def test_no_notation_leads_inside(host):
    # Some of them are no host for our own parser, some for the system's resolver: a connection is tried for none.
    with pytest.raises(TriptychError, match=r"private network|Invalid (IPv4|IDNA)|is not known"):
        await fetched(f"http://{host}:1/x", media_timeout_s=5)


@pytest.mark.parametrize("host", NEVER)
async def test_where_private_networks_are_allowed_metadata_services_and_reserved_addresses_are_not(host):
    with pytest.raises(TriptychError, match="at a reserved address") as caught:
        await fetched(f"http://{host}:1/x", media_timeout_s=5, allow_private_media_urls=True)
    assert caught.value.info.http_status == 400


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "10.1.2.3", "172.31.0.1", "192.168.1.1", "100.64.0.1", "::1", "fd12::1", "::ffff:10.1.2.3"]
)
def test_private_is_what_a_network_of_ones_own_has(address):
    assert addresses.is_private(address)
    assert not addresses.is_public(address)


@pytest.mark.parametrize(
    "url",
    [
        "http://example.org@127.0.0.1:1/",
        "http://user:s3cret@example.org/",
        "http://example.org:80\\@127.0.0.1:1/",
        "http:///x",
        "http://",
        "https:x",
        "gopher://127.0.0.1:1/",
        "file:///etc/passwd",
        "http://[::1/",
        "http://exa mple.org/",
        "http://127.0.0.1:99999/",
        "http://8.8.8.8:65536/",
        f"http://8.8.8.8:{10**30}/",
        "http://8.8.8.8:-1/",
        "http://8.8.8.8:0/",
        "http://\x00/",
        "http://" + "a" * 70000 + "/",
        "https://xn--/x.png",
        "http://xn--a..b/",
        "http://\ud800/",
        "http:////[",
    ],
)
async def test_strange_urls_are_the_clients_fault(url):
    with pytest.raises(TriptychError) as caught:
        await fetched(url, media_timeout_s=5)
    assert caught.value.info.http_status == 400
    assert "s3cret" not in str(caught.value)


def ok(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


async def test_a_name_that_changes_its_mind_is_not_asked_twice(monkeypatch):
    """DNS rebinding: the name gives a public address when it is checked, and a private one ever after."""
    async with web_server(lambda path: ok(b"secret of the inside")) as inside, outside_server() as port:
        answers = iter([[("127.0.0.2", port)]])
        inside_port = httpx.URL(inside).port

        def rebinding(host: str, number: int, **options: object) -> list[tuple[object, ...]]:
            addresses = next(answers, [("127.0.0.1", inside_port)])
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in addresses]

        monkeypatch.setattr(addresses.socket, "getaddrinfo", rebinding)
        monkeypatch.setattr(addresses, "is_public", lambda address: address == "127.0.0.2")
        fetcher = Fetcher(Settings())
        assert await fetcher.fetch(f"http://rebinding.example:{port}/", "image_url", 1000) == b"outside"
        with pytest.raises(TriptychError, match="private network"):
            await fetcher.fetch(f"http://rebinding.example:{inside_port}/", "image_url", 1000)
        fetcher.close()


class outside_server:
    """A web server on another loopback address, which plays the open internet; gives its port."""

    async def __aenter__(self) -> int:
        self._server = await asyncio.start_server(self._answer, "127.0.0.2", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ok(b"outside"))
        writer.close()


@pytest.mark.parametrize(("inside", "allow_private"), [("10.0.0.1", False), ("169.254.169.254", True)])
async def test_one_forbidden_address_among_several_is_enough_and_none_is_connected_to(
    monkeypatch, inside, allow_private
):
    resolves_to(monkeypatch, "8.8.8.8", "9.9.9.9", "1.1.1.1", "8.8.4.4", inside)
    monkeypatch.setattr(fetch.httpcore.AnyIOBackend, "connect_tcp", None)
    with pytest.raises(TriptychError, match=re.escape(inside)):
        await fetched("http://both.example/", allow_private_media_urls=allow_private)


def resolves_to(monkeypatch: pytest.MonkeyPatch, *given: str) -> None:
    """Every name leads to these addresses."""

    def look_up(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in given]

    monkeypatch.setattr(addresses.socket, "getaddrinfo", look_up)


async def test_where_an_address_refuses_connections_the_next_one_is_tried(monkeypatch):
    """As with a host of which IPv6 leads nowhere."""
    resolves_to(monkeypatch, "127.0.0.3", "127.0.0.4", "127.0.0.2")
    fetcher = Fetcher(Settings(allow_private_media_urls=True))
    async with outside_server() as port:
        assert await fetcher.fetch(f"http://two.example:{port}/", "image_url", 1000) == b"outside"
    with pytest.raises(TriptychError, match="cannot be fetched") as caught:
        await fetcher.fetch(f"http://two.example:{port}/", "image_url", 1000)  # none of them listens now
    assert caught.value.info.http_status == 400
    fetcher.close()


async def test_an_address_that_does_not_answer_leaves_the_next_one_its_share_of_the_time(monkeypatch):
    resolves_to(monkeypatch, "127.0.0.3", "127.0.0.2")
    async with outside_server() as port:
        with silent("127.0.0.3", port):
            url = f"http://two.example:{port}/"
            assert await fetched(url, allow_private_media_urls=True, media_timeout_s=6) == b"outside"


@contextmanager
def silent(address: str, port: int) -> Iterator[None]:
    """Whoever connects there hears nothing: the queue of those who wait is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind((address, port))
        listener.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex((address, port))
        yield


async def test_of_a_name_with_many_addresses_a_few_are_tried(monkeypatch):
    resolves_to(monkeypatch, *(f"127.0.0.{number}" for number in range(3, 3 + addresses._MAX_ADDRESSES)), "127.0.0.2")
    async with outside_server() as port:
        with pytest.raises(TriptychError, match="cannot be fetched"):
            await fetched(f"http://many.example:{port}/", allow_private_media_urls=True)


async def test_slow_resolvers_hold_up_nobody_else(monkeypatch):
    """Each look-up waits in a thread of its own kind; those that everybody's text is tokenised in stay free."""
    answer = threading.Event()
    monkeypatch.setattr(addresses.socket, "getaddrinfo", lambda *_, **__: answer.wait(30) and [])
    fetcher = Fetcher(Settings(media_timeout_s=0.3))
    waiting = [asyncio.create_task(fetcher.fetch(f"http://{n}.example/", "image_url", 1000)) for n in range(64)]
    async with asyncio.timeout(10):
        assert await asyncio.to_thread(lambda: "tokenised") == "tokenised"
        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(outcome, TriptychError)
            assert "took longer" in str(outcome)
    answer.set()
    fetcher.close()


async def test_only_listed_schemes(serve):
    async with serve(allowed_media_schemes="data") as rig:
        await rig.chat([image_part(picture())])
        for url in (
            "http://example.org/x.png",
            "https://example.org/x.png",
            "file:///etc/passwd",
            "ftp://x/y",
            "x",
            "",
        ):
            with pytest.raises(openai.BadRequestError, match="one of data:, not"):
                await rig.chat([{"type": "image_url", "image_url": {"url": url}}])


def redirect(location: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode()


@pytest.mark.parametrize("location", ["https://127.0.0.1:1/", "file:///etc/passwd", "gopher://127.0.0.1:1/"])
async def test_a_redirect_to_a_scheme_that_is_not_listed_is_refused(location):
    async with web_server(lambda path: redirect(location)) as url:
        with pytest.raises(TriptychError, match="is not a URL of http"):
            await fetched(url, allowed_media_schemes="data,http", allow_private_media_urls=True)


@pytest.mark.parametrize(
    "location", ["https://xn--/x.png", "http://xn--a/", "http:////[", "//[", "http://x:99999/", f"http://x:{10**30}/"]
)
async def test_a_redirect_to_what_is_no_url_is_the_clients_fault(location):
    async with web_server(lambda path: redirect(location)) as url:
        with pytest.raises(TriptychError, match=r"^image_url: ") as caught:
            await fetched(url, allow_private_media_urls=True)
    assert (caught.value.info.http_status, caught.value.info.param) == (400, "image_url")


async def test_a_name_is_looked_up_and_asked_for_as_it_was_encoded(monkeypatch):
    """Older rules would make "fass.de" of it, another host."""
    asked = []

    def look_up(host: str, *_: object, **__: object) -> None:
        asked.append(host)
        raise socket.gaierror

    monkeypatch.setattr(addresses.socket, "getaddrinfo", look_up)
    with pytest.raises(TriptychError, match="is not known"):
        await fetched("http://faß.de/")
    assert asked == ["xn--fa-hia.de"]


async def test_no_cookie_is_kept(monkeypatch):
    """Hosts that share an address would be told each other's, and one that is not ASCII would break what follows."""
    heads: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nSet-Cookie: a=b; path=/\r\nSet-Cookie: c=\xff\r\nContent-Length: 2\r\n\r\nok")
        writer.close()

    fetcher = Fetcher(Settings(allow_private_media_urls=True))
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        for _ in range(2):
            assert await fetcher.fetch(url, "image_url", 1000) == b"ok"
    assert len(heads) == 2
    assert b"cookie" not in b"".join(heads).lower()
    fetcher.close()


def trusting(monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """What a server on localhost shows, that fetchers made from here on trust."""
    authority = trustme.CA()
    server_side, client_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("localhost").configure_cert(server_side)
    authority.configure_trust(client_side)
    monkeypatch.setattr(fetch.httpx, "create_ssl_context", lambda **_: client_side)
    return server_side


async def test_a_server_that_breaks_off_tls_is_the_clients_fault(monkeypatch):
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        os.write(writer.get_extra_info("socket").fileno(), b"\x17\x03\x03\x00\x20" + b"no record" * 4)
        await reader.read()
        writer.close()

    server_side = trusting(monkeypatch)
    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=server_side) as server:
        with pytest.raises(TriptychError, match="cannot be fetched") as caught:
            await fetched(f"https://localhost:{server.sockets[0].getsockname()[1]}/", allow_private_media_urls=True)
    assert caught.value.info.http_status == 400


async def test_a_redirect_from_https_to_http_is_not_followed(monkeypatch):
    server_side = trusting(monkeypatch)
    fetcher = Fetcher(Settings(allow_private_media_urls=True))
    async with web_server(lambda path: ok(b"plain")) as plain:
        pages = {"/down": redirect(plain), "/same": redirect("/picture"), "/picture": ok(b"secure")}
        async with web_server(pages.__getitem__, server_side) as url:
            secure = url.replace("http://127.0.0.1", "https://localhost")
            assert await fetcher.fetch(f"{secure}/same", "image_url", 1000) == b"secure"
            with pytest.raises(TriptychError, match="from https to http") as caught:
                await fetcher.fetch(f"{secure}/down", "image_url", 1000)
    assert caught.value.info.http_status == 400
    fetcher.close()


async def test_files_below_the_folder_are_read(serve, tmp_path):
    (tmp_path / "sign post.png").write_bytes(picture())
    async with serve(allowed_media_folder=tmp_path) as rig:
        for url in (f"file://{tmp_path}/sign%20post.png", f"file://localhost{tmp_path}/x/../sign%20post.png"):
            os.makedirs(tmp_path / "x", exist_ok=True)
            answer = await rig.chat([{"type": "image_url", "image_url": {"url": url}}])
            assert answer.choices[0].finish_reason == "stop"
        with pytest.raises(openai.BadRequestError, match="may read"):
            await rig.chat([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}])


@pytest.mark.parametrize(
    "path",
    [
        "{folder}/../secret",
        "{folder}/%2e%2e/secret",
        "{folder}/link",
        "{folder}/linked/secret",
        "{folder}/loop",
        "{folder}/pipe",
        "{folder}",
        "{folder}/missing",
        "{folder}2/secret",
        "/etc/passwd",
        "/dev/zero",
        "/proc/self/environ",
        "//{folder}/../secret",
        "{folder}/a%00b",
        "relative",
        "//[/x",
        "[/x",
    ],
)
def test_nothing_else_is(tmp_path, path):
    folder = tmp_path / "media"
    beside = tmp_path / "media2"
    for made in (folder, beside):
        made.mkdir()
    for secret in (tmp_path / "secret", beside / "secret"):
        secret.write_text("secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "linked").symlink_to(tmp_path)
    (folder / "loop").symlink_to(folder / "loop")
    os.mkfifo(folder / "pipe")
    for prefix in ("file://", "file:", "file://other.host"):
        with pytest.raises(TriptychError, match="may read"):
            read_local(prefix + path.format(folder=folder), folder, "image_url", 1000)


def test_a_file_over_the_limit_is_not_read(tmp_path):
    (tmp_path / "big").write_bytes(bytes(2000))
    with pytest.raises(TriptychError, match="2000 bytes"):
        read_local(f"file://{tmp_path}/big", tmp_path, "image_url", 1000)


def test_a_folder_that_becomes_a_link_after_the_look_leads_nowhere(tmp_path, monkeypatch):
    inner, outside = tmp_path / "media" / "inner", tmp_path / "outside"
    for made in (inner, outside):
        made.mkdir(parents=True)
        (made / "a").write_text("secret" if made == outside else "picture")
    looked = Path.is_relative_to

    def swap(path: Path, root: Path) -> bool:
        below = looked(path, root)
        inner.rename(tmp_path / "moved")
        inner.symlink_to(outside)
        return below

    assert read_local(f"file://{inner}/a", tmp_path / "media", "image_url", 1000) == b"picture"
    monkeypatch.setattr(Path, "is_relative_to", swap)
    with pytest.raises(TriptychError, match="may read"):
        read_local(f"file://{inner}/a", tmp_path / "media", "image_url", 1000)
