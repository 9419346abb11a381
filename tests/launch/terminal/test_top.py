"""`triptych top`: what it draws of the proxy's JSON, and servers that are no proxy of Triptych."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from rich.console import Console

from common.errors import TriptychError
from launch.cli.client import ClientOptions
from launch.terminal.top import draw, run_top
from tests.launch.cli.fake_api import FakeApi

DECODER: dict[str, Any] = {
    "id": "pd0",
    "role": "prefill_decode",
    "state": "ready",
    "reason": None,
    "next_role": None,
    "started_s": 900.0,
    "running": 4,
    "waiting": 1,
    "outstanding": 5,
    "outstanding_tokens": 700,
    "caches": [{"name": "kv", "unit": "blocks", "used": 48, "capacity": 64}],
}
CLUSTER: dict[str, Any] = {
    "model": "signpost",
    "ready": True,
    "reason": None,
    "handoffs_per_s": 2.5,
    "time_s": 1000.0,
    "requests": {"running": 5, "limit": 1024},
    "queues": {"media": {"waiting": 3, "expected_wait_s": None}, "text": {"waiting": 1, "expected_wait_s": 0.25}},
    "instances": [DECODER],
}
REQUEST: dict[str, Any] = {
    "id": "chatcmpl-0123456789abcdef",
    "route": "/v1/chat/completions",
    "created_s": 997.5,
    "outcome": None,
    "spans": [
        {"stage": "proxy", "instance": "proxy", "start_s": 997.5, "end_s": 1000.0},
        {"stage": "encode", "instance": "e0", "start_s": 997.5, "end_s": 999.5},
        {"stage": "decode", "instance": "pd0", "start_s": 999.5, "end_s": 1000.0},
    ],
}


def shown(cluster: dict[str, Any], *requests: dict[str, Any]) -> str:
    console = Console(width=180)
    with console.capture() as capture:
        console.print(draw(cluster, requests))
    return capture.get()


def test_a_look_has_load_caches_queues_and_requests() -> None:
    end = {"outcome": "ok", "prompt_tokens": 40, "completion_tokens": 5, "total_ms": 2510}
    text = shown(CLUSTER, REQUEST, {**REQUEST, **end})
    assert "signpost ready · 5 of 1024 requests running · 3 media waiting (0.0 s), 1 text waiting (0.2 s)" in text
    row = next(line for line in text.splitlines() if line.startswith("pd0"))
    assert row.split()[:8] == ["pd0", "prefill_decode", "ready", "1:40", "4", "1", "5", "700"]
    assert row.split()[-2:] == ["75", "%"]
    running, ended = (line.split() for line in text.splitlines() if "chat/completions" in line)
    assert running == ["456789abcdef", "chat/completions", "running", "–", "–", "2.50", "encode", "on", "e0"]
    assert ended[2:5] == ["ok", "40", "5"]


def test_a_request_took_the_time_to_its_end_whatever_its_workers_told_of_it() -> None:
    begun = {**REQUEST, "spans": [{"stage": "proxy", "instance": "proxy", "start_s": 997.5, "end_s": 997.51}]}
    late = {**begun, "outcome": "timeout", "prompt_tokens": 9, "completion_tokens": 200, "total_ms": 3002}
    lines = [line.split() for line in shown(CLUSTER, begun, late).splitlines() if "chat/completions" in line]
    assert [line[-1] for line in lines] == ["2.50", "3.00"]


def test_trouble_is_told_with_its_reason() -> None:
    lost = {**DECODER, "state": "lost", "reason": "the connection is lost", "running": None, "caches": []}
    leaving = {**DECODER, "id": "pd1", "state": "draining", "reason": "finishes", "next_role": "decode"}
    text = shown({**CLUSTER, "ready": False, "reason": "no worker", "instances": [lost, leaving]})
    assert "not ready: no worker" in text
    assert "lost (the connection is lost)" in text
    assert "draining, then decode" in text


def test_another_server_is_no_proxy_of_triptych() -> None:
    with FakeApi() as api, pytest.raises(TriptychError, match="has no /v1/cluster: it is no proxy of Triptych"):
        asyncio.run(run_top(ClientOptions(api.url, None, 1, None, 5.0), 1.0, once=True))
