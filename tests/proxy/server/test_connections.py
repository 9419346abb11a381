"""Connections that bring nothing, or a byte now and then, cost nobody else anything and end by their deadline."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from common.config import Settings
from services.process.http_server import HttpServer
from tests.proxy.conftest import ProxyHarness, eventually

BODY = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode() + b" " * 2000
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def head(path: str, size: int) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode()


async def connect(base_url: str) -> Connection:
    return await asyncio.open_connection("127.0.0.1", int(base_url.rpartition(":")[2]))


@asynccontextmanager
async def connections(rig: ProxyHarness, count: int) -> AsyncIterator[list[Connection]]:
    """So many connections, closed at the end."""
    opened = [await connect(rig.base_url) for _ in range(count)]
    try:
        yield opened
    finally:
        for _, writer in opened:
            writer.close()


@asynccontextmanager
async def dripping(*writers: asyncio.StreamWriter, data: bytes) -> AsyncIterator[None]:
    """Meanwhile these send something ten times a second, whether anybody reads it or not."""

    async def drip() -> None:
        while True:
            for writer in writers:
                with contextlib.suppress(OSError):
                    writer.write(data)
            await asyncio.sleep(0.1)

    task = asyncio.create_task(drip())
    try:
        yield
    finally:
        task.cancel()


async def response(reader: asyncio.StreamReader) -> tuple[int, str]:
    """The status and the rest of what comes until the connection ends; (0, "") where it just ends."""
    data = b""
    async with asyncio.timeout(10):
        with contextlib.suppress(ConnectionError):
            data = await reader.read()
    return (int(data.split()[1]), data.decode()) if data else (0, "")


@pytest.fixture
def many_descriptors() -> None:
    """Both ends of two thousand connections are here."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 6000:
        pytest.skip(f"this system allows {hard} descriptors to a process")


@pytest.mark.usefixtures("many_descriptors")
async def test_two_thousand_silent_connections_disturb_nobody_and_end(serve):
    async with serve(client_timeout_s=1.2) as rig:
        assert (await rig.chat()).choices[0].finish_reason == "stop"
        before, address = len(os.listdir("/proc/self/fd")), ("127.0.0.1", httpx.URL(rig.base_url).port)
        with ExitStack() as held:
            silent = [held.enter_context(socket.create_connection(address)) for _ in range(2000)]
            await eventually(lambda: rig.count("connections") >= 2000)
            assert (await rig.chat()).choices[0].finish_reason == "stop"
            await eventually(lambda: rig.count("connections") < 10)
            # Beside the loop, which has the last few still to end.
            assert await asyncio.to_thread(lambda: {one.recv(1) for one in silent}) == {b""}
        assert rig.count("connections_ended_total", reason="timeout") >= 2000
        assert len(os.listdir("/proc/self/fd")) < before + 10  # the client's pool may have grown


async def test_heads_that_come_by_the_byte_disturb_nobody_and_end(serve):
    async with serve(client_timeout_s=0.5) as rig, connections(rig, 50) as opened:
        async with dripping(*(writer for _, writer in opened), data=b"G"):
            assert (await rig.chat()).choices[0].finish_reason == "stop"
            answers = await asyncio.gather(*(response(reader) for reader, _ in opened))
        assert {status for status, _ in answers} <= {408, 0}  # what is under way when a connection ends resets it


async def test_a_body_that_comes_too_slowly_is_given_up(serve):
    async with serve(client_timeout_s=0.3) as rig, connections(rig, 1) as [(reader, writer)]:
        writer.write(head("/v1/chat/completions", 1000) + b"xxx")
        await eventually(lambda: rig.service.admission.inflight == 1)
        status, text = await response(reader)
        assert status == 408
        assert '"code": "timeout"' in text


async def test_a_slow_body_that_gets_on_is_served(serve):
    async with serve(client_timeout_s=1.0) as rig, connections(rig, 1) as [(reader, writer)]:
        writer.write(head("/v1/chat/completions", len(BODY))[:-2] + b"Connection: close\r\n\r\n")
        for start in range(0, len(BODY), 150):  # of which 50 would do
            writer.write(BODY[start : start + 150])
            await asyncio.sleep(0.1)
        assert (await response(reader))[0] == 200


async def test_a_second_request_has_a_deadline_too(serve):
    async with serve(client_timeout_s=0.3) as rig, connections(rig, 1) as [(reader, writer)]:
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b'{"status":"ok"}')  # the head of the answer, too
        writer.write(b"GET /h")
        assert (await response(reader))[0] == 408


async def test_what_is_refused_unread_is_not_waited_for(serve):
    async with serve(client_timeout_s=0.3, api_key="right") as rig, connections(rig, 1) as [(reader, writer)]:
        writer.write(head("/v1/chat/completions", 10**9))
        assert b" 401 " in await reader.readline()
        writer.write(b"x")  # the connection is not idle then, for uvicorn alone
        async with asyncio.timeout(10):
            assert b"408" not in await reader.read()


async def test_what_is_refused_unread_and_comes_nevertheless_keeps_no_connection(serve):
    async with serve(api_key="right") as rig:
        rig.server.config.timeout_keep_alive = 1
        async with connections(rig, 1) as [(reader, writer)]:
            writer.write(head("/v1/chat/completions", 5))
            assert b" 401 " in await reader.readline()
            writer.write(b"xxxxx")
            async with asyncio.timeout(10):
                await reader.read()
        assert rig.count("connections_ended_total", reason="timeout") == 0


async def test_beyond_the_cap_the_oldest_idle_connection_makes_room(serve, monkeypatch):
    monkeypatch.setattr("common.http.connections.FRESH_S", 0.0)
    async with serve(max_connections=20) as rig, connections(rig, 30) as opened:
        assert (await rig.chat()).choices[0].finish_reason == "stop"
        assert rig.count("connections_ended_total", reason="evicted") >= 10
        ended = await asyncio.gather(*(response(reader) for reader, _ in opened[:10]))
        assert ended == [(0, "")] * 10
        assert not any(reader.at_eof() for reader, _ in opened[15:])


async def test_in_a_burst_of_connections_those_beyond_the_cap_are_refused_and_nobody_is_cut_off(serve, monkeypatch):
    """All of them are idle for a moment: none may be ended for another before it could say what it wants."""
    monkeypatch.setattr("common.http.connections.FRESH_S", 60.0)
    async with serve(max_connections=20) as rig, connections(rig, 30) as opened:
        for _, writer in opened:
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answers = await asyncio.gather(*(response(reader) for reader, _ in opened))
        assert [status for status, _ in answers] == [200] * 20 + [503] * 10
        assert all("Retry-After: 1" in text for status, text in answers if status == 503)
        assert rig.count("connections_ended_total", reason="evicted") == 0


async def test_where_all_have_requests_a_new_connection_is_refused_at_once(serve):
    async with serve(max_connections=2) as rig, connections(rig, 2) as opened:
        decoder = rig.cluster.decoders[0]
        decoder.pause_after = 0
        for _, writer in opened:
            writer.write(head("/v1/chat/completions", len(BODY)) + BODY)
        await eventually(lambda: len(decoder._running) == 2)
        async with httpx.AsyncClient(trust_env=False) as client:
            refused = await client.get(f"{rig.base_url}/health")
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "unavailable"
        decoder.resume.set()
        for reader, _ in opened:
            assert b" 200 " in await reader.readline()


@asynccontextmanager
async def serving(app: Starlette, **fields: Any) -> AsyncIterator[str]:
    """The URL of a worker's HTTP server with these settings."""
    server = HttpServer(app, "127.0.0.1", Settings(port=0, **fields))
    task = asyncio.create_task(server.run())
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.stop()
        await task


async def test_an_answer_that_is_still_being_taken_does_not_make_room():
    size = 32 * 2**20  # more than the system takes from a server whose client reads nothing
    app = Starlette(routes=[Route("/", lambda _: Response(bytes(size)))])
    request = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    async with serving(app, max_connections=1) as url:
        reader, writer = await connect(url)
        writer.write(request)
        await reader.readuntil(b"\r\n\r\n")  # uvicorn has written all of it by now
        other, other_writer = await connect(url)
        assert (await response(other))[0] == 503
        async with asyncio.timeout(10):
            assert await reader.readexactly(size) == bytes(size)
        third, third_writer = await connect(url)
        third_writer.write(request)
        async with asyncio.timeout(10):
            assert b" 200 " in await third.readline()
            assert await reader.read() == b""
        for one in (writer, other_writer, third_writer):
            one.close()


async def test_workers_do_not_wait_either():
    async with serving(Starlette(), client_timeout_s=0.3) as url:
        reader, writer = await connect(url)
        assert await response(reader) == (0, "")
        writer.close()


def test_descriptors_are_raised_and_half_of_them_kept_back():
    program = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 200))
from common.http.connections import allowed_connections
print(allowed_connections(4096), allowed_connections(50), resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "100 50 (200, 200)"
