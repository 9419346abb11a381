"""A measuring client of the OpenAI API: a call per request, with times and token counts."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from common.errors import TriptychError, invalid, words_of
from common.keys import bearer, own_api_key

_HINT = ": use /v1/completions"
"""Ends the error of a model that holds no conversations: an encoder-decoder of text, or one without a chat template."""


@dataclass(frozen=True)
class ClientOptions:
    """Address for requests, and limits of length and time for answers."""

    url: str
    model: str | None
    max_tokens: int
    temperature: float | None
    """None leaves the choice to the server."""
    timeout_s: float
    api_key: str | None = field(default=None, repr=False)
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of every body or form."""


@dataclass(frozen=True)
class Media:
    """An image or audio file for the wire."""

    name: str
    type: str
    data: bytes

    @property
    def data_url(self) -> str:
        return f"data:{self.type};base64,{base64.b64encode(self.data).decode()}"


@dataclass(frozen=True)
class ClientRequest:
    """A prompt with images, after the messages of a conversation if there is one; or an audio file to transcribe."""

    name: str
    prompt: str
    media: tuple[Media, ...] = ()
    history: tuple[dict[str, Any], ...] = ()

    @property
    def message(self) -> dict[str, Any]:
        """The last message of the chat: all images, then the prompt."""
        parts = [{"type": "image_url", "image_url": {"url": m.data_url}} for m in self.media]
        return {"role": "user", "content": [*parts, {"type": "text", "text": self.prompt}] if parts else self.prompt}


@dataclass
class ClientResult:
    """The outcome of a job. Times in seconds since the job was sent; `error` is None after success."""

    job: ClientRequest
    text: str = ""
    error: str | None = None
    request_id: str | None = None
    ttft_s: float | None = None
    last_text_s: float | None = None
    """When the last piece with text came; usage and the end of the stream follow."""
    latency_s: float = 0.0
    completion_tokens: int | None = None
    began: float = field(default_factory=time.perf_counter)

    @property
    def tokens_per_s(self) -> float | None:
        return self.completion_tokens / self.latency_s if self.completion_tokens and self.latency_s else None


OnText = Callable[[str], None]


def client_options(
    url: str | None, model: str | None, max_tokens: int, temperature: float | None, timeout_s: float
) -> ClientOptions:
    """Return options for the API at `url`, or of the cluster that runs here, with the API key of the settings.

    Raises TriptychError("invalid_request") where several clusters run here, and for a URL or settings that are wrong.
    """
    from launch.cluster.configure import load_settings
    from launch.cluster.local_registry import local_url

    base_url, api_key = (url or local_url()).rstrip("/").removesuffix("/v1"), own_api_key(load_settings({}))
    base_url = base_url if "://" in base_url else f"http://{base_url}"
    try:
        httpx.URL(base_url, port=urlsplit(base_url).port)
    except (httpx.InvalidURL, ValueError) as error:
        raise invalid(f"{base_url} is no URL: {error}", "url") from error
    return ClientOptions(base_url, model, max_tokens, temperature, timeout_s, api_key)


class ApiClient:
    """Sender of jobs. The failure of a request becomes the outcome, never an exception."""

    def __init__(self, options: ClientOptions) -> None:
        local = urlsplit(options.url).hostname in ("localhost", "127.0.0.1", "::1")
        self._options = options
        self._http = httpx.AsyncClient(
            base_url=options.url,
            timeout=httpx.Timeout(options.timeout_s, connect=5.0),
            headers={} if options.api_key is None else {"Authorization": bearer(options.api_key)},
            limits=httpx.Limits(max_connections=None),
            trust_env=not local,  # a proxy from the environment cannot reach this machine's own address
        )
        self.model = options.model
        """The model that is asked, once `connect` has chosen one."""
        self._converses = True

    async def __aenter__(self) -> ApiClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def connect(self) -> str:
        """Return the answering model: the model asked for, or the first served.

        Raises TriptychError("unavailable") where nobody answers at the URL, "invalid_api_key" for a key that is missing
        or wrong.
        """
        try:
            response = await self._http.get("/v1/models", timeout=min(10.0, self._options.timeout_s))
            if response.status_code == httpx.codes.UNAUTHORIZED:
                missing = "wants an API key: set TRIPTYCH_API_KEY, or api_key_file in triptych.toml"
                wrong = "does not accept the API key of TRIPTYCH_API_KEY or api_key_file"
                why = missing if self._options.api_key is None else wrong
                raise TriptychError("invalid_api_key", f"{self._options.url} {why}")
            response.raise_for_status()
            served = [str(entry["id"]) for entry in response.json()["data"]]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            message = f"no OpenAI API at {self._options.url} ({words_of(error)}); start one: triptych serve"
            raise TriptychError("unavailable", message) from error
        self.model = self._options.model or (served[0] if served else None)
        if self.model is None:
            raise TriptychError("unavailable", f"{self._options.url} serves no model")
        return self.model

    async def timeline(self, request_id: str) -> list[dict[str, Any]]:
        """Return the spans of a finished request: stage, instance, start_s, end_s; an empty list if unknown."""
        try:
            response = await self._http.get(f"/v1/requests/{request_id}/timeline")
            return list(response.json()["spans"]) if response.is_success else []
        except (httpx.HTTPError, ValueError, KeyError):
            return []

    async def read(self, path: str) -> dict[str, Any]:
        """Return the JSON of one of Triptych's own routes.

        Raises TriptychError("unavailable") where no proxy of Triptych answers.
        """
        try:
            response = await self._http.get(path, timeout=10.0)
            if response.status_code == httpx.codes.NOT_FOUND:
                message = f"{self._options.url} has no {path.partition('?')[0]}: it is no proxy of Triptych"
                raise TriptychError("unavailable", message)
            return dict(response.raise_for_status().json())
        except (httpx.HTTPError, ValueError) as error:
            message = f"{self._options.url} does not answer: {words_of(error)}"
            raise TriptychError("unavailable", message) from error

    async def send(self, job: ClientRequest, on_text: OnText = lambda _: None) -> ClientResult:
        """Send a job and wait for the end; `on_text` gets the pieces of the answer at once."""
        outcome = ClientResult(job)
        try:
            async with asyncio.timeout(self._options.timeout_s):  # httpx bounds the wait for each piece alone
                await self._ask(job, outcome, on_text)
        except TimeoutError:
            outcome.error = f"no whole answer within {self._options.timeout_s:g} s; --timeout SECONDS waits longer"
        except httpx.HTTPError as error:
            outcome.error = f"{type(error).__name__}: {error}".rstrip(": ")
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            outcome.error = f"the answer is not as OpenAI's API has it: {error!r}"
        outcome.latency_s = time.perf_counter() - outcome.began
        return outcome

    async def _ask(self, job: ClientRequest, outcome: ClientResult, on_text: OnText) -> None:
        if any(media.type.startswith("audio/") for media in job.media):
            await self._transcribe(job, outcome, on_text)
        elif self._converses or job.media:
            await self._generate("/v1/chat/completions", {"messages": [*job.history, job.message]}, outcome, on_text)
            self._converses = self._converses and not (outcome.error or "").endswith(_HINT)
        if not self._converses and not job.media:
            outcome.began = time.perf_counter()  # of the request that is answered
            await self._generate("/v1/completions", {"prompt": job.prompt}, outcome, on_text)

    async def _generate(self, path: str, prompt: dict[str, Any], outcome: ClientResult, on_text: OnText) -> None:
        """Stream the answer: otherwise the time to the first token could not be measured."""
        body = {
            "model": self.model,
            **prompt,
            "max_tokens": self._options.max_tokens,
            **({} if self._options.temperature is None else {"temperature": self._options.temperature}),
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._options.extra,
        }
        async with self._http.stream("POST", path, json=body) as response:
            if not response.is_success:
                outcome.error = _describe(response, await response.aread())
                return
            await _add_events(response, outcome, on_text)

    async def _transcribe(self, job: ClientRequest, outcome: ClientResult, on_text: OnText) -> None:
        """Stream the transcript; servers without streaming answer in a single piece."""
        clip = job.media[0]
        form = {"model": self.model, "temperature": str(self._options.temperature or 0.0), "stream": "true"}
        for name, value in self._options.extra.items():
            form[name] = value if isinstance(value, str) else json.dumps(value)
        if job.prompt:
            form["prompt"] = job.prompt
        files = {"file": (clip.name, clip.data, clip.type)}
        async with self._http.stream("POST", "/v1/audio/transcriptions", data=form, files=files) as response:
            outcome.request_id = response.headers.get("x-request-id")
            if not response.is_success:
                outcome.error = _describe(response, await response.aread())
            elif response.headers.get("content-type", "").startswith("text/event-stream"):
                await _add_events(response, outcome, on_text)
            else:
                body = json.loads(await response.aread())
                outcome.text, outcome.completion_tokens = str(body["text"]), output_tokens(body)
                on_text(outcome.text)


async def _add_events(response: httpx.Response, outcome: ClientResult, on_text: OnText) -> None:
    """Add the events of any stream: text, the end of the answer, usage, or an error."""
    outcome.error = "the stream ended before the answer did"
    async for given in read_events(response.aiter_lines()):
        event = given or {}
        if error := event.get("error"):
            outcome.error = str(error.get("message", error) if isinstance(error, dict) else error)
            continue
        outcome.request_id = event.get("id", outcome.request_id)
        if text := text_of(event):
            outcome.last_text_s = time.perf_counter() - outcome.began
            outcome.ttft_s = outcome.ttft_s or outcome.last_text_s
            outcome.text += text
            on_text(text)
        if event.get("type") == "transcript.text.done":
            outcome.text, outcome.error = str(event["text"]), None
        elif any(choice.get("finish_reason") for choice in event.get("choices", [])):
            outcome.error = None
        outcome.completion_tokens = output_tokens(event) or outcome.completion_tokens


async def read_events(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any] | None]:
    """Yield the JSON of every server-sent event among the lines of a stream, and None for `[DONE]`."""
    async for line in lines:
        if line.startswith("data:"):
            data = line.removeprefix("data:").strip()
            yield None if data == "[DONE]" else json.loads(data)


def text_of(event: Mapping[str, Any]) -> str:
    """Return the new text of an event of any of the three streams."""
    choices = event.get("choices", [])
    texts = (choice.get("text") or (choice.get("delta") or {}).get("content") or "" for choice in choices)
    return "".join(texts) or event.get("delta") or ""


def output_tokens(body: Mapping[str, Any]) -> int | None:
    """Return the tokens of the answer as an answer or an event counts them; None without a count."""
    usage = body.get("usage") or {}
    return usage.get("completion_tokens", usage.get("output_tokens"))


def _describe(response: httpx.Response, body: bytes) -> str:
    """Return `HTTP 400: message`, with the message of OpenAI's error shape if present."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body.decode(errors="replace")[:200] or response.reason_phrase
    return f"HTTP {response.status_code}: {message}"
