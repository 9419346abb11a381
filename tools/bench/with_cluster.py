"""A cluster of processes, asked over HTTP as any client of OpenAI's API would."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Sequence
from typing import Any

import httpx

from common.config import EngineConfig, Settings, Transport
from common.errors import TriptychError
from common.keys import bearer, cluster_token
from common.model_info import ModelInfo
from launch.cluster.local_cluster import LocalCluster
from services.process.handoff_trace import hop_latencies
from tools.bench.systems import Outcome
from tools.bench.workloads import BenchRequest

TIMEOUT_S = 300.0


class ClusterSystem:
    """Encoder, prefill-decode worker, proxy and broker, each a process, on this machine."""

    def __init__(
        self,
        info: ModelInfo,
        dtype: str,
        topology: str | None = None,
        *,
        transport: Transport = "auto",
        **engine: Any,
    ) -> None:
        """`engine` are further fields of EngineConfig."""
        settings = Settings(
            model=str(info.folder),
            port=0,
            log_level="warning",
            transport=transport,
            engine=EngineConfig.model_validate({"dtype": dtype, **engine}),
        )
        self.cluster = LocalCluster(settings, topology)
        self._info = info
        self.name = f"cluster {self.cluster.supervisor.plan.topology}"
        self.cluster.start()
        self._runner = asyncio.Runner()  # one loop and one client for all batches: connections stay open
        self._http = httpx.AsyncClient(
            base_url=self.cluster.base_url,
            timeout=TIMEOUT_S,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,
        )

    def run(self, batch: Sequence[BenchRequest]) -> list[Outcome]:
        return self._runner.run(self._run(batch))

    def hops(self, outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
        """Seconds of every hop of the handoffs of answered requests, by "moment -> moment"."""
        return hops_of(self.cluster, {outcome.request_id for outcome in outcomes})

    def close(self) -> None:
        try:
            self._runner.run(self._http.aclose())
            self._runner.close()
        finally:
            self.cluster.stop()

    async def _run(self, batch: Sequence[BenchRequest]) -> list[Outcome]:
        async with asyncio.TaskGroup() as group:
            began = time.perf_counter()
            tasks = [group.create_task(_send(self._http, request, began)) for request in batch]
        return [task.result() for task in tasks]


def ask_workers(cluster: LocalCluster, path: str) -> dict[str, httpx.Response]:
    """What each of a cluster's workers answers at a path, by its id."""
    token = cluster_token(cluster.supervisor.plan.settings)
    headers = {} if token is None else {"Authorization": bearer(token)}
    return {
        instance.id: httpx.get(
            f"{instance.http_address}{path}", headers=headers, timeout=TIMEOUT_S, trust_env=False
        ).raise_for_status()
        for instance in cluster.instances.values()
        if instance.role != "proxy"
    }


def hops_of(cluster: LocalCluster, request_ids: set[str]) -> dict[str, list[float]]:
    """Seconds of every hop of the handoffs of these requests, by "moment -> moment"."""
    entries = [answer.json() for answer in ask_workers(cluster, "/debug/handoffs").values()]
    return hop_latencies(
        [[entry for entry in side if entry["request_id"].partition(".")[0] in request_ids] for side in entries]
    )


async def _send(client: httpx.AsyncClient, request: BenchRequest, began: float) -> Outcome:
    """One streamed request: only so the time to the first token is seen."""
    path, payload = payload_of(request)
    text, ttft_s, num_tokens = "", None, 0
    async with client.stream("POST", path, **payload) as response:
        if response.is_error:
            raise TriptychError("unavailable", f"{path} answered {response.status_code}: {await response.aread()!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise TriptychError("unavailable", f"{path} answered {event['error']}")
            piece = text_of(event)
            if piece and ttft_s is None:
                ttft_s = time.perf_counter() - began
            text += piece
            num_tokens = num_tokens_of(event) or num_tokens
        request_id = response.headers.get("x-request-id", "")
    return Outcome(text, num_tokens, time.perf_counter() - began, ttft_s, request_id)


def payload_of(request: BenchRequest) -> tuple[str, dict[str, Any]]:
    """The path and what httpx sends there."""
    if request.kind == "audio":
        form = {"language": "en", "temperature": "0", "stream": "true"}
        return "/v1/audio/transcriptions", {"data": form, "files": {"file": ("clip.flac", request.clip, "audio/flac")}}
    options: dict[str, Any] = {
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": request.ignore_eos,
    }
    if request.kind == "text":
        return "/v1/completions", {"json": {"prompt": request.prompt_token_ids, **options}}
    urls = ["data:image/png;base64," + base64.b64encode(data).decode() for data in request.pictures]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*parts, {"type": "text", "text": request.question}]
    return "/v1/chat/completions", {"json": {"messages": [{"role": "user", "content": content}], **options}}


def text_of(event: dict[str, Any]) -> str:
    """The new text of an event of any of the three streams."""
    if event.get("type") == "transcript.text.delta":
        return str(event["delta"])
    return "".join(
        str(choice.get("text") or (choice.get("delta") or {}).get("content") or "")
        for choice in event.get("choices", [])
    )


def num_tokens_of(event: dict[str, Any]) -> int:
    """Tokens generated so far, where an event tells."""
    usage = event.get("usage") or {}
    return int(usage.get("completion_tokens") or usage.get("output_tokens") or 0)
