"""Observation of the proxy: metrics for Prometheus, and timelines of recent requests (which stage ran where, when)."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.messages import Span

KEPT_REQUESTS: Final = 1000
MAX_SPANS: Final = 512
"""Limit per request. Later spans of a longer request (an hour of audio) are discarded."""
WINDOW_S: Final = 10.0
MAX_EVENTS: Final = 65_536
_NAMESPACE = "triptych_proxy"
_LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)


class ProxyMetrics:
    """Metrics of an application, in a separate registry: two proxies in a process do not collide."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, namespace=_NAMESPACE, registry=self.registry)
        gauge = partial(Gauge, namespace=_NAMESPACE, registry=self.registry)
        histogram = partial(Histogram, namespace=_NAMESPACE, registry=self.registry)
        self.requests = counter("requests", "HTTP requests ended; failed streams by the error.", ["endpoint", "status"])
        self.connections = gauge("connections", "Open HTTP connections.")
        self.connections_ended = counter(
            "connections_ended",
            "HTTP connections ended from here: too slow, invalid, idle where others needed room, or one too many.",
            ["reason"],
        )
        self.inflight = gauge("inflight", "Admitted requests that have not ended.")
        self.held_bytes = gauge("held_bytes", "Bytes of bodies and media of requests that have not ended.")
        self.refused = counter(
            "refused", "Requests refused before anything was done for them, or by full workers.", ["reason"]
        )
        self.waiting = gauge("waiting", "Admitted requests without a token, with and without media.", ["line"])
        self.expected_wait = gauge(
            "expected_wait_seconds",
            "Wait for its first token of a request that comes now; 0 where the line is short.",
            ["line"],
        )
        self.running_jobs = gauge("flights", "Worker requests that have not ended.")
        self.ttft = histogram("time_to_first_token_seconds", "Arrival to first token.", buckets=_LATENCY_S)
        self.tpot = histogram("time_per_output_token_seconds", "Mean gap after the first.", buckets=_TOKEN_S)
        self.latency = histogram("request_latency_seconds", "Arrival to last token.", buckets=_LATENCY_S)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens, media included.")
        self.generation_tokens = counter("generation_tokens", "Generated tokens.")
        self.retries = counter("retries", "Repeated work: why it had to be sent again.", ["reason"])
        self.encoder_fallbacks = counter(
            "encoder_fallbacks", "Items given to decoders to encode: there was no encoder."
        )
        self.affinity = counter(
            "affinity", "Prompts by whether they went to the instance that had them cached.", ["outcome"]
        )
        self.decode_affinity = counter(
            "decode_affinity",
            "Prompts that another instance decodes than computes, by whether it had them cached.",
            ["outcome"],
        )
        self.encoder_affinity = counter(
            "encoder_affinity",
            "Media items by whether they went to the encoder that has what is known of their content.",
            ["outcome"],
        )
        self.aborts = counter("aborts", "Jobs ended before the worker was done.")
        self.unread_answers = counter("unread_answers", "Jobs ended because their client did not read the answer.")
        self.invalid_replies = counter("invalid_replies", "Messages of workers that were none, and were dropped.")
        self.media_bytes = counter("media_bytes", "Bytes of media taken in.", ["kind"])
        self.media_items = counter("media_items", "Media items taken in.", ["kind"])
        self.helper_crashes = counter(
            "helper_crashes",
            "Times that a process that decodes recordings died or took too long, and was started anew.",
        )
        self.handoffs = Rate()
        """Inputs, and keys and values, that have come to their destinations."""
        self.workers = gauge("workers", "Workers in use.", ["role"])
        self.outstanding_work = gauge(
            "outstanding_work_seconds", "Seconds of work that a role's workers have before them, together.", ["role"]
        )
        self.load_imbalance = gauge(
            "load_imbalance",
            "Outstanding tokens, of encoders items, of a role's busiest worker over their mean.",
            ["role"],
        )
        self._add_gateway_names()
        self._add_rare_ones()

    def _add_rare_ones(self) -> None:
        common: dict[str, Any] = {"namespace": _NAMESPACE, "registry": self.registry}
        self.scrape_failures = Counter(
            "scrape_failures", "Instances without readable metrics when /metrics/cluster asked.", ["role"], **common
        )
        self.traces_lost = Counter("traces_lost", "Ended requests whose traces the collector did not take.", **common)
        self.broker_up = Gauge("broker_up", "1 while the broker answers this proxy, else 0.", **common)
        self.realtime_sessions = Gauge("realtime_sessions", "Open realtime sessions.", **common)
        what = "From the arrival of the audio in which words were first heard to their event."
        self.realtime_delay = Histogram("realtime_delay_seconds", what, ["event"], buckets=_LATENCY_S, **common)

    def _add_gateway_names(self) -> None:
        """Add what gateways for inference read of a server, under vLLM's names; here of the whole cell."""
        named = partial(Gauge, registry=self.registry)
        self.cell_waiting = named("vllm:num_requests_waiting", "Requests that wait in the cell.", ["model_name"])
        self.cell_running = named("vllm:num_requests_running", "Requests that generate in the cell.", ["model_name"])
        self.cell_kv_usage = named("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", ["model_name"])
        self.cell_cache = named(
            "vllm:cache_config_info",
            "1, with the size of a KV block in tokens and the KV blocks of the cell as labels.",
            ["model_name", "block_size", "num_gpu_blocks"],
        )


@dataclass(eq=False, repr=False)
class CountRequests:
    """Middleware that counts requests by route and status. Plain ASGI: streams and disconnects pass untouched.

    A draining proxy closes the connection of each answer: a client that keeps its connections comes to another proxy.
    """

    app: ASGIApp
    metrics: ProxyMetrics
    is_draining: Callable[[], bool] = lambda: False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 500

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self.is_draining():
                    message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        try:
            await self.app(scope, receive, watch)
        finally:
            route = scope.get("route")  # unknown paths share a label: untrusted clients choose them
            status = scope.get("state", {}).get("status", status)
            self.metrics.requests.labels(getattr(route, "path", "other"), status).inc()


class Rate:
    """Events per second over the last WINDOW_S seconds; more than MAX_EVENTS of them are not counted."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times_s: deque[float] = deque(maxlen=MAX_EVENTS)

    def count(self) -> None:
        """Note an event of this moment."""
        self._times_s.append(self._clock())

    @property
    def per_s(self) -> float:
        start_s = self._clock() - WINDOW_S
        while self._times_s and self._times_s[0] < start_s:
            self._times_s.popleft()
        return len(self._times_s) / WINDOW_S


@dataclass(slots=True)
class RequestRecord:
    """A request as this proxy remembers it: no prompt, no media, no answer. `end` has the figures of its end."""

    request_id: str
    route: str
    model: str
    created_s: float
    spans: list[Span] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)
    traceparent: str | None = None
    """The caller's header of W3C Trace Context, unchecked."""

    def to_json(self, max_spans: int = MAX_SPANS) -> dict[str, Any]:
        """Return the record with the first `max_spans` spans in order of start; `outcome` is None until the end."""
        head = {"id": self.request_id, "route": self.route, "model": self.model, "created_s": self.created_s}
        spans = self.ordered_spans()
        return {
            **head,
            "outcome": None,
            **self.end,
            "num_spans": len(spans),
            "spans": spans[:max_spans],
        }

    def ordered_spans(self) -> list[dict[str, Any]]:
        ordered = sorted(self.spans, key=lambda span: (span.start_s, span.end_s))
        return [msgspec.to_builtins(span) for span in ordered]


class Timelines:
    """Records of requests by id, with their spans; the oldest ended request is discarded first."""

    def __init__(self) -> None:
        self._records: dict[str, RequestRecord] = {}
        self.on_end: Callable[[RequestRecord], None] | None = None
        """Called with each ended request, where traces are exported."""

    def open(self, request_id: str, route: str, model: str, created_s: float, traceparent: str | None = None) -> None:
        """Start the record of an admitted request. Over KEPT_REQUESTS, those that ended are discarded."""
        records = self._records
        records[request_id] = RequestRecord(request_id, route, model, created_s, traceparent=traceparent)
        while len(records) > KEPT_REQUESTS and (ended := next((one for one in records.values() if one.end), None)):
            del records[ended.request_id]

    def begin(self, job_id: str, first: Span) -> None:
        """Start the timeline of a job's response, unless another job has. Spans of unknown responses are discarded."""
        record = self._records.get(job_id.partition(".")[0])
        if record is not None and not record.spans:
            record.spans.append(first)

    def add(self, job_id: str, spans: Iterable[Span]) -> None:
        """Add spans of a job to the timeline of its response."""
        record = self._records.get(job_id.partition(".")[0])
        if record is not None:
            record.spans.extend(list(spans)[: MAX_SPANS - len(record.spans)])

    def close(self, request_id: str, figures: dict[str, Any]) -> dict[str, int]:
        """Note the end of a request. Returns the milliseconds of each stage, added up, as far as known."""
        record = self._records.get(request_id)
        if record is None:
            return {}
        record.end = figures
        if self.on_end is not None:
            self.on_end(record)
        seconds: dict[str, float] = {}
        for span in record.spans:
            seconds[span.stage] = seconds.get(span.stage, 0.0) + span.end_s - span.start_s
        return {stage: round(1000 * value) for stage, value in seconds.items()}

    def get(self, request_id: str) -> dict[str, Any] | None:
        """Return a timeline as JSON, in order of start; None for an unknown, discarded or unplaced request."""
        record = self._records.get(request_id)
        if record is None or not record.spans:
            return None
        return {"request_id": request_id, "spans": record.ordered_spans()}

    def latest(self, count: int) -> list[RequestRecord]:
        """Return the last `count` requests, the newest first."""
        return list(itertools.islice(reversed(self._records.values()), count))
