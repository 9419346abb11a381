"""The load generator's HTTP, against a real server and against one that breaks off."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.eventually import eventually
from tools.bench.client import LoadClient

EVENTS = (
    'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n',
    'data: {"choices": [{"delta": {"content": "a sign"}}]}\n\n',
    'data: {"choices": [], "usage": {"completion_tokens": 7}}\n\n',
    "data: [DONE]\n\n",
)


async def _answer(request: Request) -> Response:
    body = await request.json()
    if body == {"refuse": True}:
        return JSONResponse({"error": {"code": "overloaded"}}, 429)
    ports.add(request.client.port if request.client else 0)
    events = (*EVENTS[:2], 'data: {"error": {"code": "unavailable"}}\n\n') if "fail" in body else EVENTS
    return StreamingResponse(iter(events), media_type="text/event-stream")


ports: set[int] = set()
"""Those that clients came from."""


async def test_answers_and_refusals_are_read_to_their_end_over_one_connection():
    ports.clear()
    app = Starlette(routes=[Route("/ask", _answer, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off"))
    serving = asyncio.create_task(server.serve())
    try:
        await eventually(lambda: server.started)
        client = LoadClient(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}")
        bodies = ({"go": 1}, {"refuse": True}, {"fail": True}, {"go": 2})
        results = [await client.ask(client.build("/ask", {"json": body})) for body in bodies]
        await client.close()
    finally:
        server.should_exit = True
        await serving
    assert [(result.status, result.num_tokens) for result in results] == [(200, 7), (429, 0), (500, 0), (200, 7)]
    assert all(0 < result.ttft_s <= result.latency_s for result in results if result.status == 200)
    assert [result.text for result in results] == ["a sign", "", "a sign", "a sign"]
    assert len(ports) == 1


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"nonsense"])
async def test_an_answer_that_breaks_off_is_none(answer: bytes):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        client = LoadClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        assert (await client.ask(client.build("/ask", {"json": {}}))).status == 0


async def test_a_connection_that_its_server_may_end_at_any_moment_is_not_used_again(monkeypatch):
    """The end of it may be under way when the next request is sent, which no look beforehand can tell."""
    accepted = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal accepted
        accepted += 1
        with contextlib.suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"{}"):
                writer.write(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 2\r\n\r\n{}")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for kept_s, connections in ((20.0, 1), (0.0, 3)):
            monkeypatch.setattr("tools.bench.client.KEPT_S", kept_s)
            client = LoadClient(url)
            assert [(await client.ask(client.build("/ask", {"json": {}}))).status for _ in range(2)] == [429, 429]
            assert accepted == connections
            await client.close()


async def test_a_server_that_is_not_there_gives_no_answer():
    client = LoadClient("http://127.0.0.1:1")
    assert (await client.ask(client.build("/ask", {"json": {}}))).status == 0
