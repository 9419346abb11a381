"""What the supervisor says when it cannot look after its processes any more."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from broker.redis_client import connect
from broker.registry import Registry
from common.config import Settings
from common.errors import TriptychError
from common.messages import InstanceRecord
from launch import supervisor as module
from launch.children import Command
from launch.instance import Instance
from launch.plan import make_plan
from launch.supervisor import Supervisor
from tests.broker.conftest import broker_url, make_record
from tests.eventually import eventually

__all__ = ["broker_url"]


async def test_a_mistake_in_what_keeps_a_process_running_ends_the_watch_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WATCH_S", 0.01)
    supervisor = Supervisor(make_plan(Settings(model="signpost", port=0, broker="redis://127.0.0.1:1"), None))
    ended = Command([sys.executable, "-c", ""], dict(os.environ), tmp_path / "e0.log")
    instance = Instance("e0", "encoder", ended)
    supervisor._up = True

    def died(*_: object) -> None:
        raise ZeroDivisionError("a mistake in a reporter")

    monkeypatch.setattr(supervisor._reporter, "died", died, raising=False)
    supervisor._keepers = [asyncio.create_task(supervisor._keep(instance))]
    with pytest.raises(TriptychError, match="a mistake in a reporter") as caught:
        async with asyncio.timeout(20):
            await supervisor.watch()
    assert caught.value.info.code == "unavailable"
    await supervisor.stop()


@pytest.mark.parametrize("up", [True, False], ids=["after a restart", "while the cluster starts"])
async def test_a_worker_that_is_drained_before_it_counts_as_ready_leaves_for_good(
    tmp_path: Path, broker_url: str, up: bool
) -> None:
    supervisor = Supervisor(make_plan(Settings(model="signpost", port=0, broker=broker_url), None))
    until_told = Command([sys.executable, "-c", "import sys; sys.stdin.read()"], dict(os.environ), tmp_path / "e0.log")
    supervisor.instances = [instance] = [Instance("e0", "encoder", until_told)]
    supervisor._up = up
    redis = connect(broker_url)
    entry = Registry(redis, supervisor.plan.settings.cluster)
    await entry.register(make_record("e0"))
    supervisor._keepers = [asyncio.create_task(supervisor._keep(instance))]
    supervisor._readiness = asyncio.create_task(supervisor._watch_readiness(broker_url))
    await eventually(lambda: instance.joined, 20.0)
    assert instance.state == "starting"
    await entry.heartbeat(draining=True)
    await eventually(lambda: instance.state == "draining", 20.0)
    assert instance.child is not None
    stdin = instance.child._process.stdin
    assert stdin is not None
    stdin.close()
    await asyncio.wait_for(supervisor._keepers[0], 20.0)
    assert (instance.state, instance.restarts, instance.pid) == ("left", 0, None)
    if not up:
        await asyncio.wait_for(supervisor._wait_until_ready(time.monotonic()), 20.0)
    await supervisor.stop()
    await redis.aclose()


async def test_a_process_that_never_joins_again_is_killed_and_started_anew(
    tmp_path: Path, broker_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = Supervisor(make_plan(Settings(model="signpost", port=0, broker=broker_url), None), start_timeout_s=0.2)
    waits = Command([sys.executable, "-c", "input()"], dict(os.environ), tmp_path / "e0.log")
    supervisor.instances = [instance] = [Instance("e0", "encoder", waits)]
    supervisor._up = True
    told: list[str] = []
    monkeypatch.setattr(supervisor._reporter, "died", lambda _, how, *rest: told.append(how), raising=False)
    supervisor._keepers = [asyncio.create_task(supervisor._keep(instance))]
    supervisor._readiness = asyncio.create_task(supervisor._watch_readiness(broker_url))
    await eventually(lambda: instance.restarts > 0, 20.0)
    await supervisor.stop()
    assert told[0] == "killed by SIGKILL: it did not join the cluster within 0.2 s"


async def test_a_process_that_cannot_join_for_want_of_a_broker_is_left_alone_until_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_POLL_S", 0.005)
    away, num_looks, told = True, 0, list[str]()

    async def instances(_: Registry) -> dict[str, InstanceRecord]:
        nonlocal num_looks
        num_looks += 1
        if away:
            raise RedisConnectionError("the connection was refused")
        return {}

    monkeypatch.setattr(Registry, "instances", instances)
    broker = "redis://127.0.0.1:1"
    supervisor = Supervisor(make_plan(Settings(model="signpost", port=0, broker=broker), None), start_timeout_s=0.1)
    waits = Command([sys.executable, "-c", "input()"], dict(os.environ), tmp_path / "e0.log")
    supervisor.instances = [instance] = [Instance("e0", "encoder", waits)]
    supervisor._up = True
    monkeypatch.setattr(supervisor._reporter, "died", lambda _, how, *rest: told.append(how), raising=False)
    supervisor._keepers = [asyncio.create_task(supervisor._keep(instance))]
    await eventually(lambda: instance.pid is not None, 20.0)
    supervisor._readiness = asyncio.create_task(supervisor._watch_readiness(broker))
    await eventually(lambda: num_looks > 40, 20.0)  # between which lie ten times the time that a start may take
    assert told == []
    away = False
    await eventually(lambda: told != [], 20.0)
    await supervisor.stop()
    assert told[0] == "killed by SIGKILL: it did not join the cluster within 0.1 s"
