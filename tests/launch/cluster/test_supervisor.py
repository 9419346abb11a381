"""What the supervisor says when it cannot look after its processes any more."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from rich.console import Console

from broker.cluster.embedded import EmbeddedBroker
from broker.cluster.redis_client import connect
from broker.cluster.registry import Registry
from common.config import Settings
from common.errors import TriptychError
from common.messages import InstanceRecord, Role
from launch.cli.console import ConsoleReporter
from launch.cluster import supervisor as module
from launch.cluster.children import Backoff, Command
from launch.cluster.instance import Instance, Reporter
from launch.cluster.plan import make_plan
from launch.cluster.supervisor import Supervisor
from services.process.drain import DrainMarker
from tests.broker.cluster.test_embedded import slow_server
from tests.broker.conftest import broker_url, make_record
from tests.eventually import eventually
from tests.launch.waiting import alive

__all__ = ["broker_url"]


async def test_a_mistake_in_what_keeps_a_process_running_ends_the_watch_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WATCH_S", 0.01)
    supervisor = Supervisor(make_plan(Settings(model="signpost", port=0, broker="redis://127.0.0.1:1"), None))
    ended = Command([sys.executable, "-c", ""], dict(os.environ), tmp_path / "e0.log")
    instance = Instance("e0", "encoder", ended)
    supervisor._up = True

    def event(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a mistake in a reporter")

    monkeypatch.setattr(supervisor._reporter, "event", event)
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


@pytest.mark.parametrize("next_role", [None, "prefill_decode"])
async def test_a_worker_that_dies_while_it_drains_leaves_or_comes_back_in_the_role_that_it_was_to_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, next_role: Role | None
) -> None:
    """Without a broker that could tell: the worker's note does."""
    supervisor = Supervisor(make_plan(Settings(model="signpost", port=0, broker="redis://127.0.0.1:1"), None))
    waits = Command([sys.executable, "-c", "input()", "--role", "encoder"], dict(os.environ), tmp_path / "e0.log")
    note = DrainMarker(tmp_path / "e0.departure")
    note.write(None)  # by a former process: not of interest any more
    supervisor.instances = [instance] = [Instance("e0", "encoder", waits, note=note)]
    supervisor._up = True
    told: list[str] = []
    monkeypatch.setattr(supervisor._reporter, "event", lambda text, then="", **_: told.extend((text, then)))
    supervisor._keepers = [asyncio.create_task(supervisor._keep(instance))]
    await eventually(lambda: instance.pid is not None, 20.0)
    assert instance.child is not None
    assert not note.exists
    note.write(next_role)
    instance.started_s -= 3600.0  # it has lived for long
    instance.child.kill()
    if next_role is None:
        await asyncio.wait_for(supervisor._keepers[0], 20.0)
        assert (instance.state, instance.restarts, told[0]) == (
            "left",
            0,
            "e0 died while it was leaving (killed by SIGKILL)",
        )
    else:
        await eventually(lambda: instance.restarts == 1 and instance.pid is not None, 20.0)
        assert (instance.role, instance.command.argv[-1]) == (next_role, next_role)
        assert (note.exists, instance.next_role) == (False, None)
        assert told[1] == f"starting it again in {Backoff().after_life_of(3600.0):g} s"
    await supervisor.stop()


async def test_a_process_that_never_joins_again_is_killed_and_started_anew(
    tmp_path: Path, broker_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = Supervisor(make_plan(Settings(model="signpost", port=0, broker=broker_url), None), start_timeout_s=0.2)
    waits = Command([sys.executable, "-c", "input()"], dict(os.environ), tmp_path / "e0.log")
    supervisor.instances = [instance] = [Instance("e0", "encoder", waits)]
    supervisor._up = True
    told: list[str] = []
    monkeypatch.setattr(supervisor._reporter, "event", lambda text, **_: told.append(text))
    supervisor._keepers = [asyncio.create_task(supervisor._keep(instance))]
    supervisor._readiness = asyncio.create_task(supervisor._watch_readiness(broker_url))
    await eventually(lambda: instance.restarts > 0, 20.0)
    await supervisor.stop()
    assert told[0] == "e0 died (killed by SIGKILL: it did not join the cluster within 0.2 s). Its last lines:"


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
    monkeypatch.setattr(supervisor._reporter, "event", lambda text, **_: told.append(text))
    supervisor._keepers = [asyncio.create_task(supervisor._keep(instance))]
    await eventually(lambda: instance.pid is not None, 20.0)
    supervisor._readiness = asyncio.create_task(supervisor._watch_readiness(broker))
    await eventually(lambda: num_looks > 40, 20.0)  # between which lie ten times the time that a start may take
    assert told == []
    away = False
    await eventually(lambda: told != [], 20.0)
    await supervisor.stop()
    assert told[0] == "e0 died (killed by SIGKILL: it did not join the cluster within 0.1 s). Its last lines:"


@dataclass
class BrokerLines(Reporter):
    """What a person is told of the broker."""

    lines: list[str] = field(default_factory=list)

    def event(self, text: str, *, good: bool | None = None, log_tail: str = "", then: str = "") -> None:
        self.lines.append("back" if good else log_tail if then else "died")


@asynccontextmanager
async def kept_broker(
    reporter: Reporter, start_timeout_s: float = 120.0
) -> AsyncIterator[tuple[Supervisor, EmbeddedBroker, str]]:
    """A supervisor that runs nothing but a broker, and watches."""
    plan = make_plan(Settings(model="signpost", port=0), None)
    supervisor = Supervisor(plan, reporter, start_timeout_s)
    broker = EmbeddedBroker()
    url = broker.start()
    supervisor._broker, supervisor._up = broker, True
    supervisor._broker_keeper = asyncio.create_task(supervisor._keep_broker(broker))
    try:
        yield supervisor, broker, url
    finally:
        await supervisor.stop()
        assert not broker.running


async def answers(url: str) -> bool:
    redis = connect(url, retries=0)
    try:
        return bool(await redis.ping())
    except (RedisConnectionError, OSError):
        return False
    finally:
        await redis.aclose()


async def test_a_broker_whose_port_is_anothers_for_a_while_is_started_again_once_it_is_free() -> None:
    told = BrokerLines()
    async with kept_broker(told) as (supervisor, broker, url):
        watching = asyncio.create_task(supervisor.watch())
        assert broker.pid is not None
        os.kill(broker.pid, signal.SIGKILL)
        with somebodys_connection_from(urlsplit(url).port or 0):
            await eventually(lambda: len(told.lines) > 2, 60.0)
            assert not await answers(url)
        await eventually(lambda: answers(url), 60.0)
        await eventually(lambda: told.lines[-1] == "back", 60.0)
        assert told.lines[0] == "died"
        assert all("Address already in use" in line for line in told.lines[1:-1])
        assert not watching.done()
        watching.cancel()


def somebodys_connection_from(port: int) -> socket.socket:
    """Made the moment that the port is free; meanwhile nothing else runs in this loop."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        while True:
            connection = socket.socket()
            try:
                connection.bind(("127.0.0.1", port))
                connection.connect(server.getsockname())
            except OSError:
                connection.close()
            else:
                return connection


async def test_a_broker_that_hangs_as_it_starts_is_ended_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BROKER_TRY_S", 3.0)
    told = BrokerLines()
    async with kept_broker(told) as (supervisor, broker, url):
        slow_server(tmp_path, 60.0, monkeypatch)
        assert broker.pid is not None
        os.kill(broker.pid, signal.SIGKILL)
        await eventually(lambda: told.lines[-1:] == ["back"], 60.0)
        assert await answers(url)
        assert "did not come up within 3 s" in told.lines[1]
        assert not alive(int((tmp_path / "pid").read_text()))
        assert supervisor._failure() is None


async def test_a_broker_that_needs_long_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = BrokerLines()
    async with kept_broker(told) as (_, broker, url):
        slow_server(tmp_path, module.STOP_GRACE_S + 1.0, monkeypatch)
        assert broker.pid is not None
        os.kill(broker.pid, signal.SIGKILL)
        await eventually(lambda: answers(url), 60.0)
        assert told.lines == ["died"]


async def test_a_broker_that_does_not_come_back_within_the_time_for_a_start_ends_the_watch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_WATCH_S", 0.01)
    told = BrokerLines()
    async with kept_broker(told, start_timeout_s=3.0) as (supervisor, broker, url):
        assert broker.pid is not None
        os.kill(broker.pid, signal.SIGKILL)
        taken = somebodys_connection_from(urlsplit(url).port or 0)
        with taken, pytest.raises(TriptychError, match="Address already in use"):
            await asyncio.wait_for(supervisor.watch(), 60.0)
    assert len(told.lines) > 1


def test_tries_to_start_the_broker_again_are_told_with_their_reasons() -> None:
    out = io.StringIO()
    reporter = ConsoleReporter(Console(file=out), "1e1pd")
    reporter.event("it fails", good=False, log_tail="[tcp] Address already in use", then="trying once more in 0.4 s")
    reporter.event("the broker is back", good=True)
    shown = "✗ it fails\n    [tcp] Address already in use\n  trying once more in 0.4 s\n✓ the broker is back\n"
    assert out.getvalue() == shown


@pytest.mark.parametrize("moment", ["a try", "a pause"])
async def test_a_stop_amid_the_tries_to_start_the_broker_again_ends_them(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BROKER_TRY_S", 100.0)
    if moment == "a pause":
        monkeypatch.setattr(module, "Backoff", lambda **_: Backoff(first_s=100.0))
    told = BrokerLines()
    async with kept_broker(told) as (supervisor, broker, _):
        slow_server(tmp_path, 100.0, monkeypatch)
        assert broker.pid is not None
        os.kill(broker.pid, signal.SIGKILL)
        await eventually(lambda: told.lines == ["died"], 20.0)
        if moment == "a try":
            await eventually(lambda: (tmp_path / "pid").exists(), 20.0)
        began_s = time.monotonic()
        await supervisor.stop()
        assert time.monotonic() - began_s < 20.0
        assert supervisor._failure() is None
    if moment == "a try":
        assert not alive(int((tmp_path / "pid").read_text()))
