"""Traces as a collector receives them: bytes over HTTP, decoded by the protocol's own library."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from proxy.observe import otlp
from tests.proxy.conftest import eventually
from tests.proxy.sample_media import image_part, picture

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(ThreadingHTTPServer):
    """Takes OTLP over HTTP. `status` is its answer."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, OtlpSpan]] = []  # with the instance of each
        self.status = 200
        self.num_requests = 0
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def take(self, body: bytes) -> None:
        self.num_requests += 1
        if self.status != 200:
            return
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = {one.key: one.value.string_value for one in group.resource.attributes}
            assert resource["service.name"] == "triptych"
            instance = resource["service.instance.id"]
            self.spans += [(instance, span) for scope in group.scope_spans for span in scope.spans]


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        self.server.take(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(self.server.status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setattr(otlp, "FLUSH_S", 0.05)
    with Collector() as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


async def test_a_request_is_one_trace_over_all_instances_below_its_caller(serve, collector):
    async with serve() as rig:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        answer = await rig.chat([image_part(picture())], extra_headers=headers)
        proxy = rig.service.instance_id
    spans = collector.spans  # the end of the proxy exports what waits
    assert {span.trace_id.hex() for _, span in spans} == {TRACE}
    ((where, whole),) = [(instance, span) for instance, span in spans if span.parent_span_id.hex() == PARENT]
    assert (where, whole.name, whole.kind) == (proxy, "POST /v1/chat/completions", OtlpSpan.SPAN_KIND_SERVER)
    assert whole.status.code == Status.STATUS_CODE_OK
    stages = {(instance, span.name) for instance, span in spans if span.parent_span_id == whole.span_id}
    assert {("e0", "encode"), ("pd0", "decode"), (proxy, "proxy")} <= stages
    assert len({span.span_id for _, span in spans}) == len(spans) == len(stages) + 1
    assert all(0 < span.start_time_unix_nano <= span.end_time_unix_nano for _, span in spans)
    values = {one.key: one.value for one in whole.attributes}
    assert values["triptych.request_id"].string_value == answer.id
    assert values["gen_ai.usage.output_tokens"].int_value == answer.usage.completion_tokens


@pytest.mark.parametrize("header", ["", "00-x-y-01", f"ff-{TRACE}-{PARENT}-01", f"00-{'0' * 32}-{PARENT}-01"])
async def test_a_traceparent_that_is_none_begins_a_trace_of_its_own(serve, collector, header):
    async with serve() as rig:
        await rig.chat(extra_headers={"traceparent": header})
    (whole,) = [span for _, span in collector.spans if span.name.startswith("POST")]
    assert whole.trace_id.hex() not in (TRACE, "0" * 32)
    assert whole.parent_span_id == b""


async def test_an_unsampled_request_is_not_exported_and_a_failed_one_is_an_error(serve, collector):
    async with serve() as rig:
        await rig.chat(extra_headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
        await rig.http.post("/v1/chat/completions", json={"messages": []})
    (whole,) = [span for _, span in collector.spans]
    assert whole.status.code == Status.STATUS_CODE_ERROR


async def test_a_collector_that_refuses_costs_no_request(serve, collector):
    collector.status = 400
    async with serve() as rig:
        assert (await rig.chat()).choices
        await eventually(lambda: rig.count("traces_lost_total") == 1)
    assert collector.spans == []


def test_without_a_collector_nothing_of_opentelemetry_is_imported(monkeypatch):
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    code = (
        "import sys, proxy.app, proxy.routes\n"
        "from proxy.observe.otlp import TraceExporter\n"
        "assert TraceExporter.of_environment('p', print) is None\n"
        "ours = ('opentelemetry.exporter', 'opentelemetry.proto', 'opentelemetry.sdk.trace')\n"  # redis imports others
        "sys.exit(', '.join(name for name in sys.modules if name.startswith(ours)) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


async def test_a_collector_that_takes_nothing_is_told_once_and_again_after_it_has_taken_some(serve, collector, caplog):
    async with serve() as rig:
        for status, lost, told in ((400, 1, 1), (400, 2, 1), (200, 2, 1), (400, 3, 2)):
            collector.status, taken = status, len(collector.spans)
            await rig.chat()
            if status == 200:
                await eventually(lambda taken=taken: len(collector.spans) > taken)
            await eventually(lambda lost=lost: rig.count("traces_lost_total") == lost)
            assert [record.levelname for record in caplog.records if "Failed to export" in record.message] == [
                "ERROR"
            ] * told
        collector.status = 200
