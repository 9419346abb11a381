"""The shell around an engine, in this process, with a role that does nothing: ready, healthy, and every way to end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
import zmq.asyncio
from redis.asyncio import Redis
from structlog.testing import capture_logs

from broker.cluster.redis_client import connect
from broker.cluster.registry import HEARTBEAT_S, Registry
from broker.cluster.rpc import WorkerClient
from broker.handoff.channels import ChannelName, Delivery
from common.config import Settings
from common.errors import TriptychError
from common.keys import ClusterKey
from common.messages import Abort, Failed, Generate, Heartbeat, Inquiry, InstanceRecord, Role, ToWorker
from common.model_info import load_model_info
from common.sampling_params import SamplingParams
from services.process.drain import VARIABLE, DrainMarker
from services.process.engine_thread import EngineThread
from services.worker_context import WorkerContext
from services.worker_process import WorkerProcess
from tests.broker.conftest import make_record, stallable
from tests.eventually import eventually
from tests.worker_client import worker_client


class IdleEngine:
    """An engine that has nothing to do, and only says what it is made to say."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def step(self) -> list[str]:
        events, self.events = self.events, []
        return events

    def has_work(self) -> bool:
        return False

    def stats(self) -> dict[str, float]:
        return {"answer": 42.0, "questions_total": 7.0, "requests_running": 3.0}


@dataclass
class IdleRole:
    """A role that only notes what it is told. `may_load` holds the model back."""

    context: WorkerContext
    may_load: threading.Event
    aborted: list[str] = field(default_factory=list)
    num_reviews: int = 0
    role: ClassVar[Role] = "prefill_decode"
    channels: ClassVar[tuple[ChannelName, ...]] = ("metadata",)
    tensor_address = ""
    encodes = False

    def __post_init__(self) -> None:
        self.thread: EngineThread[IdleEngine, Any] = EngineThread(
            build=self._build, step=IdleEngine.step, next_deadline_s=lambda _: None
        )
        self.threads = (self.thread,)

    def _build(self) -> IdleEngine:
        self.may_load.wait(10)
        return IdleEngine()

    async def start(self, own: InstanceRecord) -> None: ...

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        return [self._read_events()]

    async def _read_events(self) -> None:
        raise ZeroDivisionError(await self.thread.events.get())

    def handle_request(self, proxy: bytes, message: ToWorker) -> None:
        if isinstance(message, Generate):
            self.context.proxies.add(proxy, message.request_id, attempt=message.attempt)

    def handle_delivery(self, delivery: Delivery) -> None: ...

    def abort(self, request_id: str) -> None:
        self.context.proxies.remove(request_id)
        self.aborted.append(request_id)

    async def review(self) -> None:
        self.num_reviews += 1

    def close(self) -> None: ...


@dataclass
class Running:
    shell: WorkerProcess
    role: IdleRole
    task: asyncio.Task[int]
    registry: Registry

    async def record(self) -> InstanceRecord:
        """This worker's entry in the registry, once it is there."""
        await eventually(self._registered)
        found = await self.registry.get("w0")
        assert found is not None
        return found

    async def _registered(self) -> bool:
        return await self.registry.get("w0") is not None

    async def get(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient() as http:
            return await http.get(f"http://127.0.0.1:{self.shell._http.port}{path}")


@asynccontextmanager
async def worker(broker_url: str, redis: Redis, *, may_load: bool = True, **changes: Any) -> AsyncIterator[Running]:
    loading = threading.Event()
    if may_load:
        loading.set()
    settings = Settings(broker=broker_url, cluster="c", instance_id="w0", port=0, **changes)
    roles: list[IdleRole] = []

    def make_role(context: WorkerContext) -> IdleRole:
        roles.append(IdleRole(context, loading))
        return roles[0]

    running_shell = WorkerProcess(settings, load_model_info("signpost"), "float32", make_role)
    task = asyncio.create_task(running_shell.run())
    try:
        yield Running(running_shell, roles[0], task, Registry(redis, "c"))
    finally:
        loading.set()
        if not task.done():
            os.kill(os.getpid(), signal.SIGTERM)
        await task


async def test_it_is_ready_once_loaded_and_registered(broker_url: str, redis: Redis) -> None:
    async with worker(broker_url, redis, may_load=False) as running:
        await eventually(lambda: not running.role.thread.join(0))
        assert (await running.get("/health")).status_code == 200
        waiting = await running.get("/ready")
        assert waiting.status_code == 503
        assert "being loaded" in waiting.json()["reason"]
        assert await running.registry.instances() == {}
        running.role.may_load.set()
        record = await running.record()
        await eventually(lambda: running.shell.ready() is None)
        assert (await running.get("/ready")).status_code == 200
        assert record.http_address == f"http://127.0.0.1:{running.shell._http.port}"
        assert (record.role, record.dtype) == ("prefill_decode", "float32")


@pytest.mark.parametrize("moment", ["before its channels", "before its entry"])
async def test_a_worker_whose_broker_is_away_as_it_has_loaded_waits_for_it(
    broker_url: str, redis: Redis, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    monkeypatch.setattr("services.worker_process.connect", lambda url, retries=0: connect(url, retries=0))
    with stallable(broker_url) as (cable, url):
        async with worker(url, redis, may_load=False) as running:

            def lose_the_broker() -> None:
                cable.set("reset")
                asyncio.get_running_loop().call_later(0.5, cable.set, "pass")

            async def start(own: InstanceRecord) -> None:
                lose_the_broker()

            if moment == "before its channels":
                monkeypatch.setattr(running.role, "start", start)
            else:
                monkeypatch.setattr(running.shell, "_on_loaded", lose_the_broker)
            running.role.may_load.set()
            await eventually(lambda: running.shell.ready() is None or running.task.done(), 10.0)
            assert not running.task.done()
            assert await running.registry.get("w0") is not None


async def test_metrics_hold_the_engines_numbers(broker_url: str, redis: Redis) -> None:
    async with worker(broker_url, redis) as running:
        await running.record()
        page = (await running.get("/metrics")).text
    assert "# TYPE triptych_answer gauge" in page
    assert "triptych_answer 42.0" in page
    assert "# TYPE triptych_questions_total counter" in page


async def test_the_registry_has_the_engines_figures_a_moment_later(broker_url: str, redis: Redis) -> None:
    async with worker(broker_url, redis) as running:

        async def told() -> bool:
            return (await running.record()).figures == {"requests_running": 3.0, "outstanding_work_seconds": 0.0}

        await eventually(told, timeout_s=10)


async def test_sigterm_ends_it_cleanly_and_leaves_no_key(broker_url: str, redis: Redis) -> None:
    async with worker(broker_url, redis) as running:
        await running.record()
        assert len(await redis.keys("c:*")) == 3
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(2):
            assert await running.task == 0
    assert await redis.keys("c:*") == []


def die(_: IdleEngine) -> None:
    raise ZeroDivisionError


def say_too_much(engine: IdleEngine) -> None:
    engine.events.append("an event that its role cannot handle")


@pytest.mark.parametrize("command", [die, say_too_much])
async def test_a_dead_engine_or_role_ends_the_process_with_an_error(
    broker_url: str, redis: Redis, command: Callable[[IdleEngine], None]
) -> None:
    async with worker(broker_url, redis) as running:
        await running.record()
        running.role.thread.submit(command)
        async with asyncio.timeout(5):
            assert await running.task == 1
    assert await redis.keys("c:*") == []


async def test_a_long_step_costs_neither_liveness_nor_readiness(broker_url: str, redis: Redis) -> None:
    begun, release = threading.Event(), threading.Event()

    def step(_: object) -> None:
        begun.set()
        release.wait(20)

    async with worker(broker_url, redis) as running:
        await running.record()
        running.role.thread.submit(step)
        assert await asyncio.to_thread(begun.wait, 5)
        assert [(await running.get(path)).status_code for path in ("/health", "/ready")] == [200, 200]
        assert running.role.thread.busy_s > 0, "in the same step still"
        release.set()


async def test_an_engine_that_hangs_ends_the_process_and_its_place_in_the_cluster(
    broker_url: str, redis: Redis, zmq_context: zmq.asyncio.Context, capfd: pytest.CaptureFixture[str]
) -> None:
    release = threading.Event()
    async with worker(broker_url, redis, step_timeout_s=0.4) as running:
        address = (await running.record()).requests_address
        assert running.shell.health() is None
        with closing(WorkerClient(zmq_context, address, "p0")) as proxy:
            proxy.send(Heartbeat())
            running.role.thread.submit(lambda _: release.wait(20) and None)
            async with asyncio.timeout(10):
                await proxy.lost()  # so a proxy moves what it had here, long before the entry would expire
                assert await running.task == 1
        assert running.shell.abandons_engine
        assert "one step" in (running.shell.health() or "")
        release.set()
    stacks = capfd.readouterr().err
    assert f'File "{__file__}"' in stacks, "the engine's thread, in the lambda that waits"
    assert "in Watchdog.watch" in stacks, "the tasks"
    assert await redis.keys("c:*") == []


async def test_a_younger_process_under_the_same_id_ends_it(broker_url: str, redis: Redis) -> None:
    async with worker(broker_url, redis) as running:
        record = await running.record()
        rival = make_record("w0", "prefill_decode", epoch=record.epoch + 1)
        await Registry(redis, "c").register(rival)
        async with asyncio.timeout(5):
            assert await running.task == 1
    current = await Registry(redis, "c").get("w0")
    assert current is not None
    assert current.epoch == rival.epoch


async def test_aborts_reach_the_role_but_not_for_other_proxies_requests(
    broker_url: str, redis: Redis, zmq_context: zmq.asyncio.Context
) -> None:
    async with worker(broker_url, redis) as running:
        address = (await running.record()).requests_address
        async with (
            worker_client(zmq_context, address, "p0") as owner,
            worker_client(zmq_context, address, "p1") as other,
        ):
            owner.send(Generate("r", [1], [], SamplingParams()))
            await eventually(lambda: len(running.role.context.proxies) == 1)
            other.send(Abort("r"))
            other.send(Abort("unknown"))
            await eventually(lambda: running.role.aborted == ["unknown"])
            owner.send(Abort("r"))
            await eventually(lambda: running.role.aborted == ["unknown", "r"])
            assert len(running.role.context.proxies) == 0


async def test_a_proxy_that_asks_for_a_request_is_told_only_if_it_is_not_here(
    broker_url: str, redis: Redis, zmq_context: zmq.asyncio.Context
) -> None:
    async with worker(broker_url, redis) as running:
        address = (await running.record()).requests_address
        async with worker_client(zmq_context, address, "p0") as proxy, asyncio.timeout(5):
            for name in ("r", "ended"):
                proxy.send(Generate(name, [1], [], SamplingParams(), attempt=2))
            await eventually(lambda: len(running.role.context.proxies) == 2)
            running.role.context.proxies.remove("ended")
            for inquiry in (Inquiry("r", 2), Inquiry("ended", 2), Inquiry("r", 1), Inquiry("lost", 3)):
                proxy.send(inquiry)
            answers = [await proxy.receive(), await proxy.receive()]
    assert [(type(one), one.request_id) for one in answers] == [(Failed, "r"), (Failed, "lost")]
    assert [one.attempt for one in answers if isinstance(one, Failed)] == [1, 3]
    assert all(one.error.code == "unavailable" for one in answers if isinstance(one, Failed))


async def test_what_a_silent_proxy_had_asked_for_is_dropped_and_it_learns_of_it_on_its_return(
    broker_url: str, redis: Redis, zmq_context: zmq.asyncio.Context
) -> None:
    async with worker(broker_url, redis) as running:
        running.shell._proxies._silence_s = 0.1
        address = (await running.record()).requests_address
        async with worker_client(zmq_context, address, "p0") as proxy:
            proxy.send(Generate("r", [1], [], SamplingParams()))
            await eventually(lambda: running.role.aborted == ["r"])
            proxy.send(Heartbeat())
            async with asyncio.timeout(5):
                failed = await proxy.receive()
    assert isinstance(failed, Failed)
    assert (failed.request_id, failed.error.code) == ("r", "unavailable")


async def test_what_a_proxy_leaves_is_dropped_at_once_while_the_broker_stands_still(
    broker_url: str, redis: Redis, zmq_context: zmq.asyncio.Context
) -> None:
    with stallable(broker_url) as (cable, url):
        async with worker(url, redis) as running:
            address = (await running.record()).requests_address
            await eventually(lambda: running.shell.ready() is None)
            async with worker_client(zmq_context, address, "p0") as proxy:
                proxy.send(Generate("r", [1], [], SamplingParams()))
                await eventually(lambda: len(running.role.context.proxies) == 1)
                cable.set("stall")
                await eventually(lambda: running.shell.ready() == "the broker is not reachable", 10.0)
            outstanding = running.role.context.metrics.gauges["requests_outstanding"]
            await eventually(lambda: outstanding() == 0, 2 * HEARTBEAT_S)
            assert running.role.aborted == ["r"]
            cable.set("pass")
            await eventually(lambda: running.shell.ready() is None, 10.0)


async def test_a_beat_that_the_broker_does_not_answer_is_given_up_and_the_next_one_tries_again(
    broker_url: str, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.worker_process.BEAT_S", 0.1)
    with stallable(broker_url) as (cable, url), capture_logs() as logs:
        async with worker(url, redis) as running:
            await eventually(lambda: running.shell.ready() is None)  # an entry may be there before its reply is
            cable.set("stall")
            await eventually(lambda: sum(entry["event"] == "no heartbeat" for entry in logs) > 1, 10.0)
            assert not running.task.done()
            monkeypatch.setattr("services.worker_process.BEAT_S", 3.0)
            cable.set("pass")
            await eventually(lambda: running.shell.ready() is None, 10.0)


async def test_a_drain_does_not_wait_for_a_broker_that_stands_still(
    broker_url: str, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.membership.ANNOUNCE_WAIT_S", 0.1)
    with stallable(broker_url) as (cable, url):
        async with worker(url, redis) as running:
            await eventually(lambda: running.shell.ready() is None)
            cable.set("stall")
            async with asyncio.timeout(3.0):
                assert await running.shell.drain() == 0
            cable.set("pass")


@dataclass
class Leaving:
    """A worker with one request under way, and how it is asked to leave."""

    running: Running
    proxy: WorkerClient

    async def post(self, path: str, body: object = None) -> httpx.Response:
        async with httpx.AsyncClient() as http:
            return await http.post(f"http://127.0.0.1:{self.running.shell._http.port}{path}", json=body)

    async def is_draining(self) -> bool:
        record = await self.running.registry.get("w0")
        return record is not None and record.draining

    def finish_request(self) -> None:
        self.running.shell._proxies.remove("r")


@pytest.fixture
def note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DrainMarker:
    """Where the worker's supervisor looks; of how the worker came to have its role."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "w0.departure"))
    note = DrainMarker.of_environment()
    note.write("prefill_decode")
    return note


@pytest.fixture
async def leaving(
    broker_url: str, redis: Redis, zmq_context: zmq.asyncio.Context, note: DrainMarker
) -> AsyncIterator[Leaving]:
    async with worker(broker_url, redis) as running:
        address = (await running.record()).requests_address
        await eventually(lambda: running.shell.ready() is None)
        async with worker_client(zmq_context, address, "p0") as proxy:
            delay = running.role.context.metrics.gauges["first_request_delay_seconds"]
            assert delay() == 0.0
            proxy.send(Generate("r", [1], [], SamplingParams()))
            await eventually(lambda: len(running.role.context.proxies) == 1)
            assert delay() > 0.0
            yield Leaving(running, proxy)


async def test_a_drained_worker_is_marked_at_once_finishes_what_it_has_and_ends(
    leaving: Leaving, redis: Redis, note: DrainMarker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.process.drain.NOTICE_S", 0.2)
    assert not note.exists
    reply = await leaving.post("/drain")
    assert (reply.status_code, reply.json()) == (202, {"status": "draining", "outstanding": 1})
    assert await leaving.is_draining()
    assert (note.exists, note.next_role) == (True, None)
    assert (await leaving.post("/drain")).status_code == 202  # again is as good as once
    ready = await leaving.running.get("/ready")
    assert (ready.status_code, ready.json()["reason"].split(":")[0]) == (503, "draining")
    assert (await leaving.running.get("/health")).status_code == 200
    leaving.proxy.send(Generate("late", [1], [], SamplingParams()))  # by a proxy that has not noticed yet
    await eventually(lambda: len(leaving.running.role.context.proxies) == 2)
    leaving.finish_request()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await asyncio.shield(leaving.running.task)
    still = await leaving.post("/drain?wait=0.1")
    assert (still.status_code, still.json()["outstanding"]) == (202, 1)
    assert (await leaving.post("/drain?wait=soon")).status_code == 400
    waiting = asyncio.create_task(leaving.post("/drain?wait=30"))
    leaving.running.shell._proxies.remove("late")
    async with asyncio.timeout(5):
        assert ((await waiting).status_code, (await waiting).json()["outstanding"]) == (200, 0)
        assert await leaving.running.task == 0
    assert leaving.running.shell.next_role is None
    assert await redis.keys("c:*") == []


async def test_a_switched_worker_ends_with_its_next_role(
    leaving: Leaving, note: DrainMarker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.process.drain.NOTICE_S", 0.2)
    assert (await leaving.post("/switch", {"role": "encoder"})).status_code == 202
    assert await leaving.is_draining()
    other = await leaving.post("/drain")
    assert (other.status_code, other.json()["error"]["param"]) == (400, "role")
    assert "to change its role to encoder" in other.json()["error"]["message"]
    assert (note.exists, note.next_role) == (True, "encoder")
    leaving.finish_request()
    async with asyncio.timeout(5):
        assert await leaving.running.task == 0
    assert leaving.running.shell.next_role == "encoder"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"role": "prefill_decode"}, "w0 has the role prefill_decode already"),
        ({"role": "painter"}, "is none of encoder, prefill, decode"),
        ({"role": "proxy"}, "is none of encoder, prefill, decode"),
        ({}, "missing required field `role`"),
        ({"role": 7}, "Expected `str`"),
        (None, "the body must be"),
    ],
)
async def test_an_impossible_switch_is_refused_and_changes_nothing(
    leaving: Leaving, note: DrainMarker, body: object, why: str
) -> None:
    reply = await leaving.post("/switch", body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_request")
    assert why in reply.json()["error"]["message"]
    assert not await leaving.is_draining()
    assert not note.exists
    assert leaving.running.shell.ready() is None


async def test_a_termination_while_draining_ends_it_for_good(leaving: Leaving) -> None:
    assert (await leaving.post("/switch", {"role": "encoder"})).status_code == 202
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(5):
        assert await leaving.running.task == 0
    assert leaving.running.shell.next_role is None


async def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = Settings(broker="redis://127.0.0.1:1", port=port)
        with pytest.raises(TriptychError, match=f"127.0.0.1:{port}.*give another --port"):
            WorkerProcess(
                settings, load_model_info("signpost"), "float32", lambda context: IdleRole(context, threading.Event())
            )


async def test_a_worker_without_a_broker_says_what_to_do() -> None:
    with pytest.raises(TriptychError, match="--broker"):
        WorkerProcess(
            Settings(), load_model_info("signpost"), "float32", lambda context: IdleRole(context, threading.Event())
        )


@pytest.mark.parametrize(
    ("changes", "warnings"),
    [({"host": "0.0.0.0"}, 1), ({}, 0), ({"host": "0.0.0.0", "cluster_key": ClusterKey.generate().reveal()}, 0)],
    ids=["beyond loopback", "loopback", "with a key"],
)
async def test_a_worker_that_strangers_can_use_says_so_once(
    broker_url: str, redis: Redis, changes: dict[str, Any], warnings: int
) -> None:
    with capture_logs() as logs:
        async with worker(broker_url, redis, **changes) as running:
            await running.record()
    assert sum("--cluster-key-file" in entry["event"] for entry in logs) == warnings
