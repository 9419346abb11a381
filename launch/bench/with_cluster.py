"""A cluster of processes, asked over HTTP as any client of OpenAI's API would."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Sequence
from typing import Any

import httpx

from common.config import EngineConfig, Settings
from common.errors import TriptychError
from common.messages import Span
from common.model_info import ModelInfo
from launch.bench.systems import Outcome
from launch.bench.workloads import BenchRequest
from launch.cluster import LocalCluster

TIMEOUT_S = 300.0


class ClusterSystem:
    """Encoder, prefill-decode worker, proxy and broker, each a process, on this machine."""

    def __init__(self, info: ModelInfo, dtype: str, topology: str | None = None) -> None:
        settings = Settings(
            model=str(info.folder), port=0, log_level="warning", engine=EngineConfig.model_validate({"dtype": dtype})
        )
        self._cluster = LocalCluster(settings, topology)
        self._info = info
        self.name = f"cluster {self._cluster.supervisor.plan.topology}"
        self._cluster.start()

    def run(self, batch: Sequence[BenchRequest]) -> list[Outcome]:
        return asyncio.run(self._run(batch))

    def timelines(self, outcomes: Sequence[Outcome]) -> list[list[Span]]:
        """The spans of answered requests: which stage ran where, from when to when."""
        return asyncio.run(self._fetch_timelines([outcome.request_id for outcome in outcomes]))

    def close(self) -> None:
        self._cluster.stop()

    async def _run(self, batch: Sequence[BenchRequest]) -> list[Outcome]:
        async with self._client() as client, asyncio.TaskGroup() as group:
            began, began_s = time.perf_counter(), time.time()
            tasks = [group.create_task(_send(client, request, began)) for request in batch]
        outcomes = [task.result() for task in tasks]
        if batch[0].kind != "audio":
            return outcomes
        spans = await self._fetch_timelines([outcome.request_id for outcome in outcomes])
        return [_with_ttft(outcome, each, began_s) for outcome, each in zip(outcomes, spans, strict=True)]

    async def _fetch_timelines(self, request_ids: Sequence[str]) -> list[list[Span]]:
        async with self._client() as client:
            found = [await client.get(f"/v1/requests/{request_id}/timeline") for request_id in request_ids]
        return [[Span(**span) for span in response.raise_for_status().json()["spans"]] for response in found]

    def _client(self) -> httpx.AsyncClient:
        unlimited = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(base_url=self._cluster.base_url, timeout=TIMEOUT_S, limits=unlimited, trust_env=False)


async def _send(client: httpx.AsyncClient, request: BenchRequest, began: float) -> Outcome:
    if request.kind == "audio":
        return await _transcribe(client, request, began)
    path, body = _body(request)
    text, ttft_s, usage, request_id = "", None, 0, ""
    async with client.stream("POST", path, json=body) as response:
        if response.is_error:
            raise TriptychError("unavailable", f"{path} answered {response.status_code}: {await response.aread()!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise TriptychError("unavailable", f"{path} answered {event['error']}")
            request_id = event.get("id", request_id)
            piece = "".join(_text_of(choice) for choice in event.get("choices", []))
            if piece and ttft_s is None:
                ttft_s = time.perf_counter() - began
            text += piece
            usage = (event.get("usage") or {}).get("completion_tokens", usage)
    return Outcome(text, usage, time.perf_counter() - began, ttft_s, request_id)


async def _transcribe(client: httpx.AsyncClient, request: BenchRequest, began: float) -> Outcome:
    files = {"file": ("clip.flac", request.clip, "audio/flac")}
    form = {"model": "", "language": "en", "temperature": "0", "response_format": "json"}
    response = await client.post("/v1/audio/transcriptions", data=form, files=files)
    if response.is_error:
        raise TriptychError("unavailable", f"the transcription answered {response.status_code}: {response.text}")
    body = response.json()
    num_tokens = int((body.get("usage") or {}).get("output_tokens", 0))
    request_id = response.headers.get("x-request-id", "")
    return Outcome(body["text"], num_tokens, time.perf_counter() - began, None, request_id)


def _body(request: BenchRequest) -> tuple[str, dict[str, Any]]:
    options: dict[str, Any] = {
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": request.ignore_eos,
    }
    if request.kind == "text":
        return "/v1/completions", {"prompt": request.prompt_token_ids, **options}
    urls = ["data:image/png;base64," + base64.b64encode(data).decode() for data in request.pictures]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*parts, {"type": "text", "text": request.question}]
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **options}


def _text_of(choice: dict[str, Any]) -> str:
    return str(choice.get("text") or (choice.get("delta") or {}).get("content") or "")


def _with_ttft(outcome: Outcome, spans: Sequence[Span], began_s: float) -> Outcome:
    """A transcription is not streamed: its first token is when the decoder had it."""
    first_s = min((span.end_s for span in spans if span.stage == "prefill"), default=None)
    ttft_s = None if first_s is None else first_s - began_s
    return Outcome(outcome.text, outcome.num_tokens, outcome.latency_s, ttft_s, outcome.request_id)
