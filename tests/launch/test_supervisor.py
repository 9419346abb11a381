"""What the supervisor says when it cannot look after its processes any more."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from common.config import Settings
from common.errors import TriptychError
from launch import supervisor as module
from launch.children import Command
from launch.instance import Instance
from launch.plan import make_plan
from launch.supervisor import Supervisor
from tests.broker.conftest import broker_url
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
