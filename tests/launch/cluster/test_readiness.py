"""What the supervisor makes of the registry and of the instances' own answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from broker.cluster.embedded import EmbeddedBroker
from broker.cluster.redis_client import connect
from broker.cluster.registry import Registry
from common.config import Settings
from common.errors import TriptychError
from common.messages import InstanceRecord
from launch.cluster.children import Command
from launch.cluster.instance import Instance, State
from launch.cluster.plan import make_plan
from launch.cluster.readiness import ReadinessProbe, check_broker
from tests.broker.conftest import make_record

Registered = dict[str, InstanceRecord]
Looking = tuple[ReadinessProbe, Registered]


@pytest.fixture
async def looking(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Looking]:
    """A probe, and the registry that it reads: nobody in there is ready."""
    registry: Registered = {}

    async def instances() -> Registered:
        return registry

    probe = ReadinessProbe("redis://127.0.0.1:1", "c")
    monkeypatch.setattr(probe._registry, "instances", instances)
    async with probe, httpx.AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(503))) as answering:
        monkeypatch.setattr(probe._http, "get", answering.get)
        yield probe, registry


def make_worker(**values: Any) -> Instance:
    return Instance("e0", "encoder", Command(["worker", "--role", "encoder"], {}, Path()), **values)


@pytest.mark.parametrize("state", ["starting", "switching", "ready"])
async def test_a_worker_that_is_drained_is_seen_to_leave_however_far_it_has_come(
    looking: Looking, state: State
) -> None:
    probe, registry = looking
    worker = make_worker(state=state, epoch=2, past_epoch=1)
    registry["e0"] = make_record("e0", epoch=2)
    assert await probe.changes([worker]) == []
    registry["e0"] = make_record("e0", epoch=2, draining=True)
    assert await probe.changes([worker]) == [(worker, "draining")]
    worker.state = "draining"
    assert await probe.changes([worker]) == []


async def test_a_worker_that_drains_when_it_is_first_seen_is_seen_to_leave(looking: Looking) -> None:
    probe, registry = looking
    worker = make_worker()
    registry["e0"] = make_record("e0", epoch=2, draining=True)
    assert await probe.changes([worker]) == [(worker, "draining")]
    assert worker.joined


async def test_a_proxy_that_drains_has_not_left_for_it_ends_by_a_signal_alone(looking: Looking) -> None:
    probe, registry = looking
    proxy = Instance("proxy0", "proxy", Command(["proxy"], {}, Path()), state="ready", epoch=2, past_epoch=1)
    registry["proxy0"] = make_record("proxy0", "proxy", epoch=2, draining=True)
    assert await probe.changes([proxy]) == []


async def test_what_a_former_process_was_told_is_not_told_to_the_next(looking: Looking) -> None:
    probe, registry = looking
    worker = make_worker(epoch=2, past_epoch=2)
    registry["e0"] = make_record("e0", epoch=2, draining=True)
    assert await probe.changes([worker]) == []


async def test_a_worker_that_changes_its_role_before_it_counts_as_ready_is_started_in_that_role_again(
    looking: Looking,
) -> None:
    probe, registry = looking
    worker = make_worker(epoch=2, past_epoch=1)
    registry["e0"] = make_record("e0", "prefill", epoch=3)
    assert await probe.changes([worker]) == [(worker, "switching")]
    assert (worker.role, worker.command.argv) == ("prefill", ["worker", "--role", "prefill"])


async def test_a_proxy_that_is_ready_before_its_entry_has_been_read_is_so_at_the_next_look(
    looking: Looking, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe, registry = looking
    registry["p0"] = make_record("p0", "proxy", epoch=1)
    proxy = Instance("p0", "proxy", Command([], {}, Path()), http_address="http://p0", epoch=1, past_epoch=1)
    async with httpx.AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(200))) as answering:
        monkeypatch.setattr(probe._http, "get", answering.get)
        assert await probe.changes([proxy]) == []
        registry["p0"] = make_record("p0", "proxy", epoch=2)
        assert await probe.changes([proxy]) == [(proxy, "ready")]
        proxy.state = "ready"
        assert await probe.changes([proxy]) == []


async def test_a_cluster_of_other_roles_is_refused_where_its_proxy_would_have_a_name_that_is_taken() -> None:
    plan = make_plan(Settings(model="signpost", port=0), "1e1p1d")
    with EmbeddedBroker() as url:
        async with connect(url) as redis:
            await Registry(redis, plan.settings.cluster).register(make_record("pd0", "prefill_decode"))
            await check_broker(url, plan)
            await Registry(redis, plan.settings.cluster).register(make_record("proxy", "proxy"))
        with pytest.raises(TriptychError, match="already runs proxy: give this one another --cluster"):
            await check_broker(url, plan)


async def test_a_broker_whose_registry_may_not_be_read_is_a_sentence() -> None:
    plan = make_plan(Settings(model="signpost", port=0))
    with EmbeddedBroker() as url:
        async with connect(url) as redis:
            await redis.execute_command("ACL", "SETUSER", "weak", "on", ">secret", "+@connection")
        other = f"redis://weak:secret@{url.rpartition('@')[2]}"
        with pytest.raises(TriptychError, match=r"the broker does not answer: .*smembers"):
            await check_broker(other, plan)
