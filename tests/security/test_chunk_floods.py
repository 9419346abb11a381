"""Floods of what costs much to parse: a turn of the loop takes little of it, and soon it is refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import h11
import pytest

from common.config import Settings
from common.errors import TriptychError
from common.http.connections import BODY_PIECE_BYTES, CHUNK_COST_BYTES, PIECE_BYTES, SPARE_BYTES, BoundedProtocol
from proxy.media import fetch
from proxy.media.fetch import Fetcher
from tests.proxy.conftest import ProxyHarness, serve
from tests.proxy.media.test_media import web_server
from tests.proxy.server.test_connections import connect, head
from tests.security.media.test_media_sources import trusting

__all__ = ["serve"]

PATH = "/v1/chat/completions"
CHUNKED = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
TINY = b"1\r\n \r\n"
EXTENDED = b"1;" + b"x" * 200 + b"\r\n \r\n"
LED = b"100000\r\n" + bytes(2**20) + b"\r\n" + TINY * 3000
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
FREE_CHUNKS = SPARE_BYTES // CHUNK_COST_BYTES


def chunks(data: bytes, size: int) -> bytes:
    pieces = (data[start : start + size] for start in range(0, len(data), size))
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@asynccontextmanager
async def connection(rig: ProxyHarness) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await connect(rig.base_url)
    try:
        async with asyncio.timeout(60):
            yield reader, writer
    finally:
        writer.close()


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """The status and the body of one response."""
    lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
    length = next(int(line.split()[1]) for line in lines if line.startswith(b"content-length:"))
    return int(lines[0].split()[1]), await reader.readexactly(length)


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many events of each kind servers have parsed."""
    counts: Counter[str] = Counter()
    next_event = h11.Connection.next_event

    def counting(self: h11.Connection) -> Any:
        event = next_event(self)
        if self.our_role is h11.SERVER:
            counts[type(event).__name__] += 1
        return event

    monkeypatch.setattr(h11.Connection, "next_event", counting)
    return counts


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what servers have parsed at once."""
    sizes: list[int] = []
    data_received = BoundedProtocol.data_received

    def recording(self: BoundedProtocol, data: bytes) -> None:
        sizes.append(len(data))
        data_received(self, data)

    monkeypatch.setattr(BoundedProtocol, "data_received", recording)
    return sizes


@pytest.mark.parametrize("flood", [TINY * 3000, EXTENDED * 1500, LED])
async def test_tiny_chunks_without_a_key_are_answered_and_cut_off(serve, parsed, flood):
    """Not even what was large before them buys them more."""
    async with serve(api_key="right") as rig, connection(rig) as (reader, writer):
        writer.write(CHUNKED)
        assert (await answer(reader))[0] == 401
        with contextlib.suppress(ConnectionError):
            writer.write(flood)
            await writer.drain()
            assert await reader.read() == b""
        assert rig.count("connections_ended_total", reason="invalid") == 1
        assert parsed["Data"] < FREE_CHUNKS + 2**20 // PIECE_BYTES + 100


@pytest.mark.parametrize("flood", [TINY * 3000, EXTENDED * 1500])
async def test_a_body_in_too_many_tiny_chunks_is_refused(serve, parsed, flood):
    async with serve() as rig, connection(rig) as (reader, writer):
        writer.write(CHUNKED + flood)
        status, body = await answer(reader)
        assert status == 400
        error = json.loads(body)["error"]
        assert (error["code"], error["type"]) == ("invalid_request", "invalid_request_error")
        assert "tiny chunks" in error["message"]
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        assert parsed["Data"] < FREE_CHUNKS + 100


async def test_a_body_in_small_chunks_is_served(serve):
    """As of a client that writes what it has."""
    async with serve() as rig, connection(rig) as (reader, writer):
        body = json.dumps({"messages": [{"role": "user", "content": "x" * 400}], "max_tokens": 1}).encode()
        for size, spaces in ((1, 0), (10, 9_000), (100, 300_000)):
            writer.write(CHUNKED + chunks(body + b" " * spaces, size))
            assert (await answer(reader))[0] == 200


async def test_what_is_parsed_at_once_is_small_but_for_bodies_of_known_length(serve, pieces):
    async with serve(api_key="right") as rig, connection(rig) as (reader, writer):
        writer.write(CHUNKED)
        assert (await answer(reader))[0] == 401
        writer.write(chunks(bytes(400_000), 1000))
        writer.write(HEALTH * 2000)  # one after the other is answered
        for _ in range(2000):
            assert (await answer(reader))[0] == 200
        assert max(pieces) == PIECE_BYTES
        writer.write(head(PATH, 8 * 2**20) + bytes(8 * 2**20))
        assert (await answer(reader))[0] == 401
        writer.write(HEALTH)
        assert (await answer(reader))[0] == 200
        assert max(pieces) == BODY_PIECE_BYTES


async def test_who_is_refused_with_a_body_can_read_why_and_ask_again(serve):
    async with serve(api_key="right") as rig, connection(rig) as (reader, writer):
        for request in (head(PATH, 10**6) + bytes(10**6), CHUNKED + chunks(bytes(10**6), 8192)):
            writer.write(request)
            await writer.drain()  # as clients do that read only then
            assert (await answer(reader))[0] == 401
            writer.write(HEALTH)
            assert (await answer(reader))[0] == 200


@pytest.mark.parametrize("before", [b"", HEALTH, head("/health", 1) + b"x", CHUNKED + chunks(b"x", 1)])
async def test_a_head_that_is_too_large_is_refused_even_where_it_comes_at_once(serve, parsed, before):
    """It does not come with what is before it and may be read in large pieces, either."""
    async with serve(api_key="right") as rig, connection(rig) as (reader, writer):
        writer.write(before + HEALTH[:-2] + b"a:b\r\n" * 14_000 + b"\r\n")
        if before:
            await answer(reader)
        status, body = await answer(reader)
        assert status == 400
        assert "16 KiB" in json.loads(body)["error"]["message"]
        assert parsed["Request"] == bool(before)


async def test_a_head_of_fair_size_is_read(serve):
    async with serve() as rig, connection(rig) as (reader, writer):
        writer.write(HEALTH[:-2] + b"Cookie: " + b"x" * 12_000 + b"\r\n\r\n")
        assert (await answer(reader))[0] == 200


async def test_what_is_no_chunk_after_the_answer_is_cut_off_quietly(serve):
    broken: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: broken.append(context))
    async with serve(api_key="right") as rig, connection(rig) as (reader, writer):
        writer.write(CHUNKED)
        assert (await answer(reader))[0] == 401
        writer.write(b"no size\r\n")
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
    assert broken == []


OK = b"HTTP/1.1 200 OK\r\n"
SENT_CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
HINT = b"HTTP/1.1 103 Early Hints\r\n\r\n"
GOOD = OK + b"Content-Length: 4\r\n\r\ngood"


@asynccontextmanager
async def fetching() -> AsyncIterator[Fetcher]:
    fetcher = Fetcher(Settings(allow_private_media_urls=True))
    yield fetcher
    fetcher.close()


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (SENT_CHUNKED + TINY * 3000 + b"0\r\n\r\n", "too many tiny pieces"),
        (SENT_CHUNKED + EXTENDED * 3000 + b"0\r\n\r\n", "no data|too many tiny pieces"),
        (SENT_CHUNKED + LED + b"0\r\n\r\n", "too many tiny pieces"),
        (SENT_CHUNKED + b"1\r\n \r\n0\r\n" + b"a: b\r\n" * 12_000 + b"\r\n", "no data"),
        (HINT * 3000 + GOOD, "no data"),
        (OK + b"a: b\r\n" * 12_000 + GOOD.removeprefix(OK), "no data"),
    ],
)
async def test_a_media_server_that_sends_little_data_is_refused(sent, says):
    async with web_server(lambda _: sent) as url, fetching() as fetcher:
        with pytest.raises(TriptychError, match=says) as caught:
            await fetcher.fetch(url, "image_url", 2**22)
    assert (caught.value.info.code, caught.value.info.param) == ("bad_media", "image_url")


async def test_over_tls_too(monkeypatch):
    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HINT * 3000 + GOOD)
        writer.close()

    tls = trusting(monkeypatch)
    async with await asyncio.start_server(send, "127.0.0.1", 0, ssl=tls) as server, fetching() as fetcher:
        with pytest.raises(TriptychError, match="no data"):
            await fetcher.fetch(f"https://localhost:{server.sockets[0].getsockname()[1]}/", "image_url", 2**22)


async def test_hints_and_small_chunks_are_taken():
    data = bytes(range(256)) * 1000
    pages = {
        "/hints": HINT * 10 + GOOD,
        "/tiny": SENT_CHUNKED + chunks(data[:900], 1),
        "/small": SENT_CHUNKED + chunks(data, 100),
        "/large": OK + b"Content-Length: %d\r\n\r\n" % len(data) + data,
        "/until-closed": OK + b"\r\n" + data,
    }
    async with web_server(pages.__getitem__) as url, fetching() as fetcher:
        for path, expected in zip(pages, (b"good", data[:900], data, data, data), strict=True):
            assert await fetcher.fetch(url + path, "image_url", 2**22) == expected


async def test_of_many_chunks_others_have_their_turn_in_between():
    loop, turn, taken = asyncio.get_running_loop(), 0, Counter[int]()

    def next_turn() -> None:
        nonlocal turn, ticking
        turn += 1
        ticking = loop.call_soon(next_turn)

    ticking = loop.call_soon(next_turn)
    async with web_server(lambda _: SENT_CHUNKED + chunks(bytes(900), 1)) as url, fetching() as fetcher:
        await fetcher.fetch(url, "image_url", 1000, lambda _: taken.update([turn]))
    ticking.cancel()
    assert sum(taken.values()) > 900
    assert max(taken.values()) <= fetch._CHUNKS_PER_TURN + 1
