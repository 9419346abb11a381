"""A client of OpenAI's API that measures: requests are bytes made beforehand, connections are kept.

The load shares its cores with the server under test. A general HTTP client takes about as much time for a request as
the server takes to refuse one; under overload the figures would be those of the client.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from tools.bench.workloads import BenchRequest

TIMEOUT_S: Final = 600.0
KEPT_S: Final = 5.0
"""A connection idle for longer is closed, as general clients do, before its server does: a request that meets the
server's end of a connection is lost, and would count as a failure of the server."""
_LINE_BYTES: Final = 2**20


@dataclass(frozen=True)
class Outcome:
    """One answered request. Times are seconds since the request was sent, or since its batch was handed in.

    `status` is the HTTP status, 0 without a whole answer; `error` says why there is no text. `ttft_s` is None where a
    system does not tell.
    """

    text: str = ""
    num_tokens: int = 0
    latency_s: float = float("inf")
    ttft_s: float | None = None
    request_id: str = ""
    status: int = 200
    error: str = ""

    @property
    def tpot_s(self) -> float:
        """Seconds for each token after the first one."""
        return (self.latency_s - (self.ttft_s or 0.0)) / max(1, self.num_tokens - 1)


class LoadClient:
    """Connections to one server; as many as there are requests at once, each used again."""

    def __init__(self, base_url: str) -> None:
        self._url = urlsplit(base_url)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter, float]] = []  # and when each was used

    def build(self, path: str, payload: Mapping[str, Any]) -> bytes:
        """Return a request as bytes to send. `payload`: keyword arguments of httpx."""
        request = httpx.Request("POST", self._url.geturl() + path, **payload)
        body = request.read()
        head = b"".join(name + b": " + value + b"\r\n" for name, value in request.headers.raw)
        return f"POST {request.url.raw_path.decode()} HTTP/1.1\r\n".encode() + head + b"\r\n" + body

    async def ask(self, request: bytes) -> Outcome:
        """Send one request and read the answer, events as a stream, to its end. Raise nothing of the network."""
        began_s = time.perf_counter()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._ask(request, began_s)
        except (OSError, TimeoutError, EOFError, ValueError, IndexError) as error:
            return Outcome(status=0, error=repr(error))

    async def keep_in_flight(self, requests: Iterable[bytes], count: int) -> list[Outcome]:
        """Send all requests, `count` at once: the next one as soon as one has ended."""
        waiting = iter(requests)

        async def work() -> list[Outcome]:
            return [await self.ask(request) for request in waiting]

        return list(itertools.chain.from_iterable(await asyncio.gather(*(work() for _ in range(count)))))

    def close(self) -> None:
        for _, writer, _ in self._idle:
            writer.close()
        self._idle.clear()

    async def _ask(self, request: bytes, began_s: float) -> Outcome:
        reader, writer = await self._connection()
        try:
            writer.write(request)
            status, headers = await _head(reader)
            if (length := headers.get("content-length")) is None:
                outcome = await _read_events(reader, status, headers, began_s)
            else:
                body = await reader.readexactly(int(length))
                outcome = _whole(body, status, headers, began_s)
        except BaseException:
            writer.close()
            raise
        self._idle.append((reader, writer, time.perf_counter()))
        return outcome

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            reader, writer, used_s = self._idle.pop()
            if not reader.at_eof() and time.perf_counter() - used_s < KEPT_S:
                return reader, writer
            writer.close()
        return await asyncio.open_connection(self._url.hostname, self._url.port, limit=_LINE_BYTES)


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    status, headers = int((await reader.readline()).split()[1]), {}
    while (line := await reader.readline()) not in (b"\r\n", b""):
        name, _, value = line.decode().partition(":")
        headers[name.lower()] = value.strip()
    return status, headers


def _whole(body: bytes, status: int, headers: Mapping[str, str], began_s: float) -> Outcome:
    """An answer in one piece: an error, or the transcription of a server that does not stream."""
    took_s, request_id = time.perf_counter() - began_s, headers.get("x-request-id", "")
    if status != 200:
        return Outcome(request_id=request_id, status=status, error=body.decode(errors="replace"))
    text = str(json.loads(body).get("text", ""))
    return Outcome(text, len(text.split()), took_s, took_s, request_id, status)


async def _read_events(
    reader: asyncio.StreamReader, status: int, headers: Mapping[str, str], began_s: float
) -> Outcome:
    """Read an event stream. Between its lines stand the lengths of chunks; a length of 0 is the last."""
    text, ttft_s, num_tokens, error = "", None, 0, ""
    while (line := await reader.readline()) != b"0\r\n":
        if not line:
            raise EOFError
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            status, error = 500, str(event["error"])
        if piece := text_of(event):
            text += piece
            ttft_s = ttft_s or time.perf_counter() - began_s
        num_tokens = _num_tokens(event) or num_tokens
    await reader.readline()
    latency_s = time.perf_counter() - began_s
    if status == 200 and not num_tokens:
        num_tokens = len(text.split())  # of a server that sends no usage
    request_id = headers.get("x-request-id", "")
    return Outcome(text, num_tokens, latency_s, ttft_s or latency_s, request_id, status, error)


def text_of(event: dict[str, Any]) -> str:
    """Return the new text of an event of any of the three streams."""
    if event.get("type") == "transcript.text.delta":
        return str(event["delta"])
    return "".join(
        str(choice.get("text") or (choice.get("delta") or {}).get("content") or "")
        for choice in event.get("choices", [])
    )


def _num_tokens(event: dict[str, Any]) -> int:
    usage = event.get("usage") or {}
    return int(usage.get("completion_tokens") or usage.get("output_tokens") or 0)


def payload_of(
    request: BenchRequest, model: str | None = None, language: str | None = "en"
) -> tuple[str, dict[str, Any]]:
    """Return the path of a request and the keyword arguments of httpx for it."""
    named = {} if model is None else {"model": model}
    if request.kind == "audio":
        named |= {} if language is None else {"language": language}
        form = {**named, "temperature": "0", "stream": "true"}
        return "/v1/audio/transcriptions", {"data": form, "files": {"file": ("clip.flac", request.clip, "audio/flac")}}
    options: dict[str, Any] = {
        **named,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": request.ignore_eos,
    }
    if request.kind == "text":
        return "/v1/completions", {"json": {"prompt": request.prompt_token_ids, **options}}
    urls = ["data:image/png;base64," + base64.b64encode(data).decode() for data in request.pictures]
    images: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*images, {"type": "text", "text": request.question}]
    return "/v1/chat/completions", {"json": {"messages": [{"role": "user", "content": content}], **options}}
