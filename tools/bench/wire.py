"""HTTP as a load generator sends it: bytes made beforehand, over connections that are kept.

A load shares its cores with the server that it measures. A general client takes about as much time for a request as the
server takes to refuse one, so that under overload it would be the client that is measured.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from tools.bench.with_cluster import num_tokens_of, text_of

TIMEOUT_S: Final = 120.0
KEPT_S: Final = 5.0
"""A connection that nobody has used for longer is closed, as general clients do, before its server does: a request
that meets the server's end of it is lost, and would count as one that the server has failed."""
_LINE_BYTES: Final = 2**20


@dataclass(frozen=True)
class Result:
    """What became of one request: its HTTP status, 0 where it has no whole answer, and when its first and its last
    token came after it was sent.
    """

    status: int
    ttft_s: float = float("inf")
    latency_s: float = float("inf")
    num_tokens: int = 0


class Wire:
    """Connections to one server; as many as there are requests at once, each used again."""

    def __init__(self, base_url: str) -> None:
        self._url = urlsplit(base_url)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter, float]] = []  # and when each was used

    def build(self, path: str, payload: Mapping[str, Any]) -> bytes:
        """A request as it is sent. `payload`: what httpx takes."""
        request = httpx.Request("POST", self._url.geturl() + path, **payload)
        body = request.read()
        head = b"".join(name + b": " + value + b"\r\n" for name, value in request.headers.raw)
        return f"POST {path} HTTP/1.1\r\n".encode() + head + b"\r\n" + body

    async def ask(self, request: bytes) -> Result:
        """Send one request and read its answer, events as a stream, to the end. Raises nothing of the network."""
        began_s = time.perf_counter()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._ask(request, began_s)
        except (OSError, TimeoutError, EOFError, ValueError, IndexError):
            return Result(0)

    def close(self) -> None:
        for _, writer, _ in self._idle:
            writer.close()
        self._idle.clear()

    async def _ask(self, request: bytes, began_s: float) -> Result:
        reader, writer = await self._connection()
        try:
            writer.write(request)
            status, length = await _head(reader)
            if length is None:
                result = await _events(reader, status, began_s)
            else:
                await reader.readexactly(length)
                result = Result(status)
        except BaseException:
            writer.close()
            raise
        self._idle.append((reader, writer, time.perf_counter()))
        return result

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            reader, writer, used_s = self._idle.pop()
            if not reader.at_eof() and time.perf_counter() - used_s < KEPT_S:
                return reader, writer
            writer.close()
        return await asyncio.open_connection(self._url.hostname, self._url.port, limit=_LINE_BYTES)


async def _head(reader: asyncio.StreamReader) -> tuple[int, int | None]:
    """The status, and the length of what follows; None where it comes in chunks."""
    status, length = int((await reader.readline()).split()[1]), None
    while (line := await reader.readline()) not in (b"\r\n", b""):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    return status, length


async def _events(reader: asyncio.StreamReader, status: int, began_s: float) -> Result:
    """Read an event stream. Between its lines stand the lengths of chunks; one of 0 is the last."""
    ttft_s, num_tokens = None, 0
    while (line := await reader.readline()) != b"0\r\n":
        if not line:
            raise EOFError
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            status = 500
        if ttft_s is None and text_of(event):
            ttft_s = time.perf_counter() - began_s
        num_tokens = num_tokens_of(event) or num_tokens
    await reader.readline()
    latency_s = time.perf_counter() - began_s
    return Result(status, latency_s if ttft_s is None else ttft_s, latency_s, num_tokens)
