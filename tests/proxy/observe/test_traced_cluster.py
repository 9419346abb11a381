"""The trace of one request through real processes, as a collector receives it."""

from __future__ import annotations

import httpx
import pytest

from common.config import Settings
from launch.cluster.local_cluster import LocalCluster
from tests.eventually import eventually
from tests.proxy.observe.test_otlp import PARENT, TRACE, Collector, collector
from tests.proxy.sample_media import image_part, picture

__all__ = ["collector"]


@pytest.mark.cluster
@pytest.mark.slow
async def test_encoder_prefill_and_decode_are_stages_of_one_trace(collector: Collector) -> None:
    with LocalCluster(Settings(port=0), "1e1p1d") as cluster:
        content = [image_part(picture()), {"type": "text", "text": "What does the sign say?"}]
        async with httpx.AsyncClient(base_url=cluster.base_url, timeout=60) as http:
            answer = await http.post(
                "/v1/chat/completions",
                json={"messages": [{"role": "user", "content": content}]},
                headers={"traceparent": f"00-{TRACE}-{PARENT}-01"},
            )
            assert answer.status_code == 200, answer.text

            async def complete() -> bool:  # workers report their spans beside the answer, and some after it
                timeline = (await http.get(f"/v1/requests/{answer.json()['id']}/timeline")).json()
                return {"encode", "prefill", "decode"} <= {span["stage"] for span in timeline["spans"]}

            await eventually(complete)
    assert {span.trace_id.hex() for _, span in collector.spans} == {TRACE}
    (whole,) = [span for _, span in collector.spans if span.parent_span_id.hex() == PARENT]
    stages = {(instance, span.name) for instance, span in collector.spans if span.parent_span_id == whole.span_id}
    assert {("e0", "encode"), ("p0", "prefill"), ("d0", "decode")} <= stages
    assert all(
        whole.start_time_unix_nano <= span.start_time_unix_nano <= whole.end_time_unix_nano
        for _, span in collector.spans
    )
