"""Observation of the proxy: metrics for Prometheus, and timelines of recent requests (which stage ran where, when)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Final

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.messages import Span

KEPT_REQUESTS: Final = 1000
MAX_SPANS: Final = 512
"""Limit per request. Later spans of a longer request (an hour of audio) are discarded."""
_LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)


class ProxyMetrics:
    """Metrics of an application, in a separate registry: two proxies in a process do not collide."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.requests = Counter("triptych_proxy_requests", "HTTP requests ended.", ["endpoint", "status"], registry=r)
        self.connections = Gauge("triptych_proxy_connections", "Open HTTP connections.", registry=r)
        self.connections_ended = Counter(
            "triptych_proxy_connections_ended",
            "HTTP connections ended from here: too slow, invalid, idle where others needed room, or one too many.",
            ["reason"],
            registry=r,
        )
        self.inflight = Gauge("triptych_proxy_inflight", "Admitted requests that have not ended.", registry=r)
        self.held_bytes = Gauge(
            "triptych_proxy_held_bytes", "Bytes of bodies and media of requests that have not ended.", registry=r
        )
        self.refused = Counter(
            "triptych_proxy_refused", "Requests refused before anything was done for them.", ["reason"], registry=r
        )
        self.waiting = Gauge(
            "triptych_proxy_waiting", "Admitted requests without a token, with and without media.", ["line"], registry=r
        )
        self.expected_wait = Gauge(
            "triptych_proxy_expected_wait_seconds",
            "Wait for its first token of a request that comes now; 0 where the line is short.",
            ["line"],
            registry=r,
        )
        self.flights = Gauge("triptych_proxy_flights", "Worker requests that have not ended.", registry=r)
        self.ttft = Histogram(
            "triptych_proxy_time_to_first_token_seconds", "Arrival to first token.", buckets=_LATENCY_S, registry=r
        )
        self.tpot = Histogram(
            "triptych_proxy_time_per_output_token_seconds", "Mean gap after the first.", buckets=_TOKEN_S, registry=r
        )
        self.latency = Histogram(
            "triptych_proxy_request_latency_seconds", "Arrival to last token.", buckets=_LATENCY_S, registry=r
        )
        self.prompt_tokens = Counter("triptych_proxy_prompt_tokens", "Prompt tokens, media included.", registry=r)
        self.generation_tokens = Counter("triptych_proxy_generation_tokens", "Generated tokens.", registry=r)
        self.retries = Counter(
            "triptych_proxy_retries", "Repeated work: why it had to be sent again.", ["reason"], registry=r
        )
        self.encoder_fallbacks = Counter(
            "triptych_proxy_encoder_fallbacks", "Items given to decoders to encode: there was no encoder.", registry=r
        )
        self.affinity = Counter(
            "triptych_proxy_affinity",
            "Prompts by whether they went to the instance that had them cached.",
            ["outcome"],
            registry=r,
        )
        self.decode_affinity = Counter(
            "triptych_proxy_decode_affinity",
            "Prompts that another instance decodes than computes, by whether it had them cached.",
            ["outcome"],
            registry=r,
        )
        self.encoder_affinity = Counter(
            "triptych_proxy_encoder_affinity",
            "Media items by whether they went to the encoder that has what is known of their content.",
            ["outcome"],
            registry=r,
        )
        self.aborts = Counter("triptych_proxy_aborts", "Jobs ended before the worker was done.", registry=r)
        self.unread_answers = Counter(
            "triptych_proxy_unread_answers", "Jobs ended because their client did not read the answer.", registry=r
        )
        self.invalid_replies = Counter(
            "triptych_proxy_invalid_replies", "Messages of workers that were none, and were dropped.", registry=r
        )
        self.media_bytes = Counter("triptych_proxy_media_bytes", "Bytes of media taken in.", ["kind"], registry=r)
        self.media_items = Counter("triptych_proxy_media_items", "Media items taken in.", ["kind"], registry=r)
        self.helper_crashes = Counter(
            "triptych_proxy_helper_crashes",
            "Times that a process that decodes recordings died or took too long, and was started anew.",
            registry=r,
        )
        self.workers = Gauge("triptych_proxy_workers", "Workers in use.", ["role"], registry=r)
        self.load_imbalance = Gauge(
            "triptych_proxy_load_imbalance",
            "Outstanding tokens, of encoders items, of a role's busiest worker over their mean.",
            ["role"],
            registry=r,
        )

    def text(self) -> bytes:
        return generate_latest(self.registry)


class CountRequests:
    """Middleware that counts requests by route and status. Plain ASGI: streams and disconnects pass untouched."""

    def __init__(self, app: ASGIApp, metrics: ProxyMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            route = scope.get("route")  # unknown paths share a label: untrusted clients choose them
            self._metrics.requests.labels(getattr(route, "path", "other"), status).inc()


class Timelines:
    """Spans by request id; the oldest request is discarded first."""

    def __init__(self, kept: int = KEPT_REQUESTS) -> None:
        self._kept = kept
        self._spans: OrderedDict[str, list[Span]] = OrderedDict()

    def begin(self, job_id: str, first: Span) -> None:
        """Start the timeline of a job's response, unless another job has. Spans of unknown responses are discarded."""
        request_id = job_id.partition(".")[0]
        if request_id not in self._spans:
            self._spans[request_id] = [first]
        while len(self._spans) > self._kept:
            self._spans.popitem(last=False)

    def add(self, job_id: str, spans: Iterable[Span]) -> None:
        """Add spans of a job to the timeline of its response."""
        known = self._spans.get(job_id.partition(".")[0])
        if known is not None:
            known.extend(list(spans)[: MAX_SPANS - len(known)])

    def get(self, request_id: str) -> dict[str, Any] | None:
        """Return a timeline as JSON, in order of start; None for an unknown or discarded request."""
        spans = self._spans.get(request_id)
        if spans is None:
            return None
        ordered = sorted(spans, key=lambda span: (span.start_s, span.end_s))
        return {"request_id": request_id, "spans": [msgspec.to_builtins(span) for span in ordered]}
