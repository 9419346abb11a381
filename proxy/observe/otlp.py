"""Traces for OpenTelemetry: one per request over all processes, made of the spans that come back with the answers.

Every span of a worker reaches the proxy anyhow, for the timeline. So the proxy exports for all: no worker needs a
collector, and no message carries a trace id. OpenTelemetry's packages are imported only where a collector is named.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from common.errors import how_to_install
from common.telemetry import get_logger
from proxy.server.metrics import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
FLUSH_S: Final = 2.0
"""Pause between exports. Encoders may report for a moment after the last token."""
MAX_WAITING: Final = 4096
"""Ended requests that wait for export; with a collector that is down, the oldest are dropped."""
MAX_BATCH: Final = 64
CLOSE_S: Final = 2.0
_PARENT: Final = re.compile("(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")

log = get_logger()


class TraceExporter:
    """Exports ended requests from a thread of its own, so that a slow collector holds up no request."""

    def __init__(self, exporter: SpanExporter, proxy: str, count_lost: Callable[[int], None]) -> None:
        """`proxy` is this instance's id; `count_lost` is told of requests that were not exported."""
        self._exporter = exporter
        self._proxy = proxy
        self._count_lost = count_lost
        self._waiting: deque[RequestRecord] = deque()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._reached = True
        logging.getLogger(type(exporter).__module__).addFilter(lambda _: self._reached)  # of failures the first

    @classmethod
    def of_environment(cls, proxy: str, count_lost: Callable[[int], None]) -> TraceExporter | None:
        """Return an exporter where OpenTelemetry's variables name a collector, else None."""
        given = os.environ.get
        off = given("OTEL_SDK_DISABLED", "").lower() == "true" or given("OTEL_TRACES_EXPORTER") == "none"
        if off or not any(map(given, ENDPOINTS)):
            return None
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError as error:
            log.warning("no traces: OpenTelemetry is missing", install=how_to_install("otel"), error=str(error))
            return None
        return cls(OTLPSpanExporter(), proxy, count_lost)

    def start(self) -> None:
        self._thread.start()

    def add(self, record: RequestRecord) -> None:
        """Export the trace of an ended request soon, unless its caller has decided against a trace."""
        parent = _PARENT.fullmatch(record.traceparent or "")
        if parent is not None and not int(parent[3], 16) & 1:
            return
        self._waiting.append(record)
        if len(self._waiting) > MAX_WAITING:
            self._waiting.popleft()
            self._count_lost(1)

    def close(self) -> None:
        """Export what waits, for CLOSE_S at most."""
        self._stop.set()
        self._thread.join(CLOSE_S)
        self._reached = True  # what a closed exporter filters goes through

    def _run(self) -> None:
        stopped = False
        while not stopped:
            stopped = self._stop.wait(FLUSH_S)
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(MAX_BATCH, len(self._waiting)))]
                self._export(batch)
        self._exporter.shutdown()

    def _export(self, batch: list[RequestRecord]) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        spans = [span for record in batch for span in trace(record, self._proxy)]
        try:
            done = self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception as error:  # whatever the library or the network does, requests go on
            log.warning("traces were not exported", error=repr(error))
            done = False
        self._reached = done
        if not done:
            self._count_lost(len(batch))


def trace(record: RequestRecord, proxy: str) -> list[ReadableSpan]:
    """Return the spans of an ended request: the whole first, then each stage under the instance that ran it."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    def context(trace_id: int, span_id: int, *, remote: bool = False) -> SpanContext:
        return SpanContext(trace_id, span_id, remote, TraceFlags(TraceFlags.SAMPLED))

    def resource(instance: str) -> Resource:
        name = os.environ.get("OTEL_SERVICE_NAME", "triptych")
        return Resource({"service.name": name, "service.instance.id": instance})

    given = _PARENT.fullmatch(record.traceparent or "")
    trace_id, parent_id = (int(given[1], 16), int(given[2], 16)) if given else (0, 0)
    parent = context(trace_id, parent_id, remote=True) if trace_id and parent_id else None
    own = context(trace_id if parent else _random_id(16), _random_id(8))
    end, outcome = record.end, record.end.get("outcome", "")
    attributes: dict[str, Any] = {
        "triptych.request_id": record.request_id,
        "triptych.outcome": outcome,
        "gen_ai.request.model": record.model,
        "gen_ai.usage.input_tokens": end.get("prompt_tokens", 0),
        "gen_ai.usage.output_tokens": end.get("completion_tokens", 0),
    }
    whole = ReadableSpan(
        f"POST {record.route}",
        own,
        parent,
        resource(proxy),
        attributes,
        kind=SpanKind.SERVER,
        status=Status(StatusCode.OK if outcome == "ok" else StatusCode.ERROR),
        start_time=_nanoseconds(record.created_s),
        end_time=_nanoseconds(record.created_s + end.get("total_ms", 0) / 1e3),
    )
    stages = [
        ReadableSpan(
            span.stage,
            context(own.trace_id, _random_id(8)),
            own,
            resource(span.instance),
            {"triptych.request_id": record.request_id},
            start_time=_nanoseconds(span.start_s),
            end_time=_nanoseconds(max(span.start_s, span.end_s)),
        )
        for span in record.spans
    ]
    return [whole, *stages]


def _random_id(size: int) -> int:
    return int.from_bytes(secrets.token_bytes(size)) or 1


def _nanoseconds(time_s: float) -> int:
    return int(max(0.0, min(time_s, time.time() + 86_400)) * 1e9)
