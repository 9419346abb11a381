"""A client of OpenAI's API that measures: requests are made beforehand, connections are kept.

The load shares its cores with the server under test. httpx takes about as much time for a request as the server takes
to refuse one; httpcore, the library below it, takes a fraction.
"""

from __future__ import annotations

import asyncio
import codecs
import itertools
import json
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpcore
import httpx

from launch.cli.client import ClientRequest, Media, output_tokens, read_events, text_of
from tools.bench.workloads import BenchRequest

TIMEOUT_S: Final = 600.0
KEPT_S: Final = 5.0
"""A connection idle for longer is closed, as general clients do, before its server does: a request that meets the
server's end of a connection is lost, and would count as a failure of the server."""
_DEADLINES: Final = {"timeout": dict.fromkeys(("connect", "read", "write", "pool"), TIMEOUT_S)}


@dataclass(frozen=True)
class Outcome:
    """One answered request. Times are seconds since the request was sent, or since its batch was handed in.

    `status` is the HTTP status, 0 without a whole answer; `error` says why there is no text. `ttft_s` is None where a
    system does not tell. `gaps_s` lie between the pieces of a stream.
    """

    text: str = ""
    num_tokens: int = 0
    latency_s: float = float("inf")
    ttft_s: float | None = None
    request_id: str = ""
    status: int = 200
    error: str = ""
    gaps_s: Sequence[float] = ()

    @property
    def tpot_s(self) -> float:
        """Seconds for each token after the first one."""
        return (self.latency_s - (self.ttft_s or 0.0)) / max(1, self.num_tokens - 1)


class LoadClient:
    """Connections to one server; as many as there are requests at once, each used again."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url
        self._pool = httpcore.AsyncConnectionPool(max_connections=None, keepalive_expiry=KEPT_S)

    def build(self, path: str, payload: Mapping[str, Any]) -> httpcore.Request:
        """Return a request to send. `payload`: keyword arguments of httpx."""
        made = httpx.Request("POST", self._base_url + path, **payload)
        url = httpcore.URL(str(made.url))
        return httpcore.Request("POST", url, headers=made.headers.raw, content=made.read(), extensions=_DEADLINES)

    async def ask(self, request: httpcore.Request) -> Outcome:
        """Send one request and read the answer, events as a stream, to its end. Raise nothing of the network."""
        began_s = time.perf_counter()
        try:
            response = await self._pool.handle_async_request(request)
            try:
                return await _read(response, began_s)
            finally:
                await response.aclose()
        except (OSError, ValueError, *_NETWORK) as error:
            return Outcome(status=0, error=repr(error))

    async def keep_in_flight(self, requests: Iterable[httpcore.Request], count: int) -> list[Outcome]:
        """Send all requests, `count` at once: the next one as soon as one has ended. Outcomes are in their order."""
        waiting = enumerate(requests)

        async def work() -> list[tuple[int, Outcome]]:
            return [(number, await self.ask(request)) for number, request in waiting]

        done = itertools.chain.from_iterable(await asyncio.gather(*(work() for _ in range(count))))
        return [outcome for _, outcome in sorted(done, key=lambda pair: pair[0])]

    async def close(self) -> None:
        await self._pool.aclose()


_NETWORK: Final = (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError)


async def _read(response: httpcore.Response, began_s: float) -> Outcome:
    headers = {name.lower(): value.decode() for name, value in response.headers}
    request_id, status = headers.get(b"x-request-id", ""), response.status
    if headers.get(b"content-type", "").startswith("text/event-stream"):
        return await _read_stream(response, request_id, began_s)
    body = await response.aread()
    took_s = time.perf_counter() - began_s
    if status != 200:
        return Outcome(request_id=request_id, status=status, error=body.decode(errors="replace"))
    text = str(json.loads(body).get("text", ""))  # the transcription of a server that does not stream
    return Outcome(text, len(text.split()), took_s, took_s, request_id)


async def _read_stream(response: httpcore.Response, request_id: str, began_s: float) -> Outcome:
    text, num_tokens, status, error = "", 0, response.status, ""
    times_s: list[float] = []
    async for event in read_events(_lines(response)):
        if event is None:
            continue
        if "error" in event:
            status, error = 500, str(event["error"])
        if piece := text_of(event):
            text += piece
            times_s.append(time.perf_counter())
        num_tokens = output_tokens(event) or num_tokens
    latency_s = time.perf_counter() - began_s
    if status == 200 and not num_tokens:
        num_tokens = len(text.split())  # of a server that sends no usage
    ttft_s = times_s[0] - began_s if times_s else latency_s
    gaps_s = [after - before for before, after in itertools.pairwise(times_s)]
    return Outcome(text, num_tokens, latency_s, ttft_s, request_id, status, error, gaps_s)


async def _lines(response: httpcore.Response) -> AsyncIterator[str]:
    rest, decoder = "", codecs.getincrementaldecoder("utf-8")()
    async for data in response.aiter_stream():
        *lines, rest = (rest + decoder.decode(data)).split("\n")
        for line in lines:
            yield line


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
    pictures = tuple(Media("picture.png", "image/png", data) for data in request.pictures)
    messages = [ClientRequest("", request.question, pictures).message]
    return "/v1/chat/completions", {"json": {"messages": messages, **options}}
