"""/v1/cluster and /v1/requests: what the proxy knows of the cluster and its requests, and nothing of their content."""

from __future__ import annotations

import json
import time

import pytest

from broker.cluster.registry import RECORD_TTL_S
from common.errors import ErrorInfo
from common.messages import Span
from proxy.page.overview import LISTED_SPANS
from proxy.server.metrics import KEPT_REQUESTS, WINDOW_S, Rate, RequestRecord, Timelines
from tests.proxy.conftest import eventually
from tests.proxy.sample_media import image_part, picture

SECRET = "what does the sign of Mrs Miller say"


async def _cluster(rig) -> dict:
    return (await rig.http.get("/v1/cluster")).raise_for_status().json()


async def _states(rig) -> dict[str, str]:
    return {one["id"]: one["state"] for one in (await _cluster(rig))["instances"]}


async def test_the_cluster_has_its_instances_by_role_and_what_they_report(serve) -> None:
    async with serve(encoders=2) as rig:
        await rig.cluster.encoders[0].registry.heartbeat(
            outstanding=3, figures={"encoder_items_open": 3.0, "preprocess_waiting": 2.0}
        )
        figures = {
            "requests_running": 4.0,
            "requests_waiting": 1.0,
            "kv_blocks_used": 10.0,
            "kv_blocks_usable": 64.0,
            "offers_open": 5.0,
        }
        await rig.cluster.decoders[0].registry.heartbeat(outstanding=5, outstanding_tokens=700, figures=figures)
        await eventually(lambda: all(rig.service.pool.seen[name].figures for name in ("e0", "pd0")))
        body = await _cluster(rig)
        roles = {one["id"]: one["role"] for one in body["instances"]}
        assert roles == {"e0": "encoder", "e1": "encoder", "pd0": "prefill_decode", "proxy": "proxy"}
        assert (body["model"], body["media"], body["ready"], body["reason"]) == (
            "signpost",
            ["image", "video"],
            True,
            None,
        )
        encoder, silent, decoder = (
            next(one for one in body["instances"] if one["id"] == name) for name in ("e0", "e1", "pd0")
        )
        assert (encoder["running"], encoder["waiting"], encoder["queues"]) == (3, 2, {"preprocess": 2})
        assert (silent["running"], silent["queues"], silent["caches"]) == (None, {}, [])
        assert (decoder["running"], decoder["waiting"], decoder["outstanding_tokens"]) == (4, 1, 700)
        assert decoder["caches"] == [{"name": "kv", "unit": "blocks", "used": 10, "capacity": 64}]
        assert decoder["queues"] == {"offers from others": 5}


async def test_states_tell_who_drains_who_is_lost_and_who_does_not_fit(serve) -> None:
    async with serve(encoders=2) as rig:
        await rig.cluster.add_decoder(fingerprint="another")
        await rig.cluster.encoders[0].registry.heartbeat(draining=True)
        await rig.cluster.encoders[1].die(leave_entry=True)

        async def settled() -> bool:
            return await _states(rig) == {
                "e0": "draining",
                "e1": "lost",
                "pd0": "ready",
                "pd1": "refused",
                "proxy": "ready",
            }

        await eventually(settled)
        reasons = {one["id"]: one["reason"] for one in (await _cluster(rig))["instances"]}
        assert "fingerprint" in reasons["pd1"]
        await eventually(lambda: "e1" not in rig.service.pool.seen, timeout_s=RECORD_TTL_S + 3)


async def test_a_request_is_listed_with_its_stages_and_figures_and_without_its_content(rig) -> None:
    answer = await rig.chat([image_part(picture()), {"type": "text", "text": SECRET}])
    await eventually(lambda: len(rig.service.timelines.latest(1)[0].spans) >= 3)
    response = await rig.http.get("/v1/requests")
    (one,) = response.json()["data"]
    assert (one["id"], one["route"], one["model"]) == (answer.id, "/v1/chat/completions", "signpost")
    assert (one["outcome"], one["completion_tokens"]) == ("ok", answer.usage.completion_tokens)
    assert one["prompt_tokens"] == answer.usage.prompt_tokens
    assert {"proxy", "encode"} <= {span["stage"] for span in one["spans"]}
    assert one["num_spans"] == len(one["spans"])
    assert [span["start_s"] for span in one["spans"]] == sorted(span["start_s"] for span in one["spans"])
    for word in (SECRET, answer.choices[0].message.content, "base64"):
        assert word not in response.text
    assert rig.service.metrics.handoffs.per_s == 1 / WINDOW_S


async def test_a_request_is_listed_before_it_ends_and_with_its_error_after(rig) -> None:
    rig.cluster.encoders[0].script = lambda message: ErrorInfo("bad_media", "no picture")
    with pytest.raises(Exception, match="no picture"):
        await rig.chat([image_part(picture())])
    await rig.http.post("/v1/chat/completions", json={"messages": []})
    newest, oldest = (await rig.http.get("/v1/requests")).json()["data"]
    assert (newest["outcome"], newest["spans"], oldest["outcome"]) == ("invalid_request", [], "bad_media")
    assert (await rig.http.get(f"/v1/requests/{newest['id']}/timeline")).status_code == 404
    rig.service.timelines.open("running", "/v1/completions", "signpost", time.time())
    assert (await rig.http.get("/v1/requests?limit=1")).json()["data"][0]["outcome"] is None


@pytest.mark.parametrize("limit", ["0", "-1", "1001", "x", "", "1e3", "9" * 5000, "²"])
async def test_a_limit_that_is_none_is_refused_in_a_sentence(rig, limit: str) -> None:
    response = await rig.http.get("/v1/requests", params={"limit": limit})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "limit"


@pytest.mark.parametrize("path", ["/v1/cluster", "/v1/requests"])
async def test_both_want_a_key_where_there_are_keys(serve, path: str) -> None:
    async with serve(api_key="right") as rig:
        assert (await rig.http.get(path)).status_code == 401
        assert (await rig.http.get(path, headers={"Authorization": "Bearer right"})).status_code == 200


def test_the_list_is_bounded_in_requests_and_in_spans() -> None:
    timelines = Timelines()
    for number in range(KEPT_REQUESTS + 5):
        timelines.open(f"r{number}", "/", "m", float(number))
        timelines.add(f"r{number}", [Span("encode", "e0", float(i), i + 1.0) for i in range(100)])
        timelines.close(f"r{number}", {"outcome": "ok"})
    records = timelines.latest(KEPT_REQUESTS + 5)
    assert [records[0].request_id, records[-1].request_id, len(records)] == ["r1004", "r5", KEPT_REQUESTS]
    listed = records[0].to_json(LISTED_SPANS)
    assert (len(listed["spans"]), listed["num_spans"]) == (LISTED_SPANS, 100)
    json.dumps(listed)


def test_a_request_under_way_is_not_forgotten_for_those_that_came_and_went_since() -> None:
    timelines, ended = Timelines(), list[RequestRecord]()
    timelines.open("early", "/v1/completions", "m", 1.0, "00-trace")
    for number in range(KEPT_REQUESTS + 5):
        timelines.open(f"r{number}", "/tokenize", "m", 2.0)
        timelines.close(f"r{number}", {"outcome": "ok"})
    timelines.begin("early.1", Span("proxy", "p0", 1.0, 3.0))
    timelines.on_end = ended.append
    assert timelines.close("early", {"outcome": "ok"}) == {"proxy": 2000}
    assert [(one.route, one.created_s, one.traceparent) for one in ended] == [("/v1/completions", 1.0, "00-trace")]
    timelines.begin("unknown", Span("proxy", "p0", 1.0, 3.0))
    assert timelines.get("unknown") is None


def test_a_rate_forgets_what_is_older_than_its_window() -> None:
    now_s = [0.0]
    rate = Rate(lambda: now_s[0])
    for _ in range(20):
        rate.count()
    assert rate.per_s == 20 / WINDOW_S
    now_s[0] = WINDOW_S + 0.1
    assert rate.per_s == 0
