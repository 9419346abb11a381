"""What the supervisor makes of the registry and of the instances' own answers."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from common.messages import InstanceRecord
from launch.children import Command
from launch.instance import Instance
from launch.readiness import ReadinessProbe
from tests.broker.conftest import make_record


async def test_a_proxy_that_is_ready_before_its_entry_has_been_read_is_so_at_the_next_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    former, present = make_record("p0", "proxy", epoch=1), make_record("p0", "proxy", epoch=2)
    proxy = Instance("p0", "proxy", Command([], {}, Path()), http_address="http://p0", epoch=1, past_epoch=1)
    registry: dict[str, InstanceRecord] = {"p0": former}

    async def instances() -> dict[str, InstanceRecord]:
        return registry

    probe = ReadinessProbe("redis://127.0.0.1:1", "c")
    monkeypatch.setattr(probe._registry, "instances", instances)
    async with probe, httpx.AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(200))) as answering:
        monkeypatch.setattr(probe._http, "get", answering.get)
        assert await probe.changes([proxy]) == []
        registry["p0"] = present
        assert await probe.changes([proxy]) == [(proxy, "ready")]
        proxy.state = "ready"
        assert await probe.changes([proxy]) == []
