"""Workers that come, go and change their roles while a cluster answers, as a person does it from another terminal."""

from __future__ import annotations

import asyncio
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from common.config import Settings
from common.errors import TriptychError
from common.keys import cluster_token
from launch.cli.client import ApiClient, ClientOptions, ClientRequest, Media
from launch.cli.members import Members
from launch.cluster.local_registry import reach
from tests.eventually import eventually
from tests.launch.cli.serving import Serving
from tests.launch.waiting import alive
from tools.signpost.scenes import SIZES, render

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
START_S = 100.0
LEAVE_S = 60.0
WORK_S, BUSY_S = 2.0, 10.0
"""From joining a cluster under load to the first request, by the worker's own clock: what is promised, and what a
machine may take on which something else had both cores at that moment. Not every worker meets with that."""
IN_FLIGHT = 4
COMMAND = (sys.executable, "-m", "launch.cli.app")
QUESTION = "What does the sign say?"
WRONG_CLOCK = """
import time
right_s, right_ns = time.time, time.time_ns
time.time, time.time_ns = lambda: right_s() + 3600, lambda: right_ns() + 3600 * 10**9
"""


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """`triptych serve signpost --topology 3e1pd`, whose folder for other commands is the test's."""
    folder = tmp_path_factory.mktemp("members")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        serving = Serving(folder, "signpost", "--topology", "3e1pd", "--kv-cache-bytes", "32MiB")
        try:
            serving.wait_until("OpenAI API at")
            yield serving
        finally:
            serving.close()


@asynccontextmanager
async def members() -> AsyncIterator[Members]:
    async with Members(reach(Settings())) as found:
        yield found


@asynccontextmanager
async def load(base_url: str) -> AsyncIterator[None]:
    """Questions about new signs all the time, four at once; afterwards every one has been answered.

    The model is right about nearly all of them.
    """
    rng, stop, outcomes = random.Random(7), asyncio.Event(), list[tuple[str | None, bool]]()

    async def ask(client: ApiClient) -> None:
        while not stop.is_set():
            sign, data = render(rng, rng.choice(SIZES), "test"), io.BytesIO()
            sign.image.save(data, "PNG")
            outcome = await client.send(
                ClientRequest("sign", QUESTION, (Media("sign.png", "image/png", data.getvalue()),))
            )
            outcomes.append((outcome.error, outcome.text.strip() == sign.answers["text"]))

    async with ApiClient(ClientOptions(base_url, None, 16, 0.0, 60.0)) as client:
        await client.connect()
        asking = [asyncio.create_task(ask(client)) for _ in range(IN_FLIGHT)]
        try:
            yield
        finally:
            stop.set()
            await asyncio.gather(*asking)
    assert [error for error, _ in outcomes if error is not None] == []
    assert sum(right for _, right in outcomes) > 0.8 * len(outcomes) > IN_FLIGHT


async def test_the_hops_of_handoffs_are_shown_although_workers_want_a_key(serving: Serving) -> None:
    async with load(serving.base_url):
        await eventually(_shows_hops, timeout_s=60)


async def _shows_hops() -> bool:
    process = await asyncio.create_subprocess_exec(*COMMAND, "status", "--handoffs", stdout=subprocess.PIPE)
    shown, _ = await process.communicate()
    assert process.returncode == 0
    return "offer_sent -> offer_received" in shown.decode()


async def test_workers_come_go_and_change_their_roles_and_no_request_notices(serving: Serving, tmp_path: Path) -> None:
    """One of them from a host whose clock is an hour ahead: nobody reads another one's clock."""
    told: list[str] = []
    pid, pd_pid = serving.pid_of("e1"), serving.pid_of("pd0")
    async with members() as cluster, load(serving.base_url):
        before = await cluster.find("e1")
        await cluster.switch("e1", "prefill_decode", LEAVE_S, told.append)
        now = await cluster.find("e1")
        assert (now.role, now.draining) == ("prefill_decode", False)
        assert now.epoch > before.epoch
        assert told[-1] == "e1 has the role prefill_decode now"
        serving.wait_until(f"e1 has the role prefill_decode now (pid {pid})", 10)
        delays_s = [await _first_request_delay_s(cluster, "e1")]

        assert "pd0 has left" in await run("drain", "pd0")  # all that decodes now is what was an encoder
        serving.wait_until("pd0 has left", 10)
        assert not alive(pd_pid)

        async with _joined("new", tmp_path) as worker:
            delays_s.append(await _first_request_delay_s(cluster, "new"))
            assert "e1 has the role encoder now" in await run("switch", "e1", "--role", "encoder")
            serving.wait_until(f"e1 has the role encoder now (pid {pid})", 10)
            delays_s.append(await _first_request_delay_s(cluster, "e1"))
            status = json.loads(await run("status", "--json"))
            roles = {one["instance_id"]: one["role"] for one in status}
            encoders = dict.fromkeys(("e0", "e1", "e2"), "encoder")
            assert roles == encoders | {"proxy": "proxy", "new": "prefill_decode"}
            assert str(worker) not in serving.output, "serve looks after what it has started"
            await cluster.switch("e0", "prefill_decode", LEAVE_S, told.append)  # somebody has to go on
    assert min(delays_s) < WORK_S, delays_s
    assert max(delays_s) < BUSY_S, delays_s


async def test_what_cannot_be_is_refused_with_the_reason(serving: Serving) -> None:
    async with members() as cluster:
        with pytest.raises(
            TriptychError, match=r"no worker or proxy 'pd7' in cluster 'triptych' now: it has e0, e1, e2, proxy$"
        ):
            await cluster.drain("pd7", 1, print)
        with pytest.raises(TriptychError, match=r"no worker 'proxy' in cluster 'triptych' now: it has e0, e1, e2$"):
            await cluster.switch("proxy", "decode", 1, print)
        with pytest.raises(TriptychError, match="e1 has the role encoder already"):
            await cluster.switch("e1", "encoder", 1, print)
    stranger = reach(Settings()).model_copy(update={"cluster_key": SecretStr("ab" * 32)})
    async with Members(stranger) as cluster:
        with pytest.raises(TriptychError, match="e1 wants the cluster's key: set TRIPTYCH_CLUSTER_KEY"):
            await cluster.drain("e1", 1, print)


async def test_a_worker_that_is_killed_while_it_leaves_or_changes_its_role_has_done_so_all_the_same(
    serving: Serving,
) -> None:
    pid = serving.pid_of("e2")

    def kill(line: str) -> None:
        if "is draining" in line:
            os.kill(pid, signal.SIGKILL)

    async with members() as cluster:
        await cluster.switch("e2", "prefill_decode", START_S, kill)
        now = await cluster.find("e2")
        assert (now.role, now.draining) == ("prefill_decode", False)
        serving.wait_until("e2 is back", 20)
        pid = serving.pid_of("e2")
        await cluster.drain("e2", LEAVE_S, kill)
        assert set(await cluster.records()) == {"proxy", "e0", "e1"}
    serving.wait_until("e2 died while it was leaving (killed by SIGKILL)", 10)
    assert not alive(pid)


async def _first_request_delay_s(cluster: Members, instance_id: str) -> float:
    """From when a worker came, or came back in another role, to its first request, by its own count."""
    headers = {"Authorization": f"Bearer {cluster_token(reach(Settings()))}"}
    async with httpx.AsyncClient(headers=headers, trust_env=False) as client:
        delay_s = 0.0

        async def has_work() -> bool:
            nonlocal delay_s
            text = (await client.get(f"{(await cluster.find(instance_id)).http_address}/metrics")).text
            told = re.search(r"^triptych_first_request_delay_seconds (\S+)", text, re.MULTILINE)
            assert told is not None
            delay_s = float(told[1])
            return delay_s > 0.0

        await eventually(has_work, START_S)
        return delay_s


async def run(*arguments: str) -> str:
    """A command of another terminal; its output."""
    process = await asyncio.create_subprocess_exec(*COMMAND, *arguments, stdout=subprocess.PIPE)
    async with asyncio.timeout(LEAVE_S):
        output, _ = await process.communicate()
    assert process.returncode == 0, output
    return output.decode()


@asynccontextmanager
async def _joined(instance_id: str, folder: Path) -> AsyncIterator[int]:
    """A worker of another host, once it is in the cluster: its process id. Ends by itself when it is drained."""
    (folder / "sitecustomize.py").write_text(WRONG_CLOCK)
    options = ("--role", "prefill_decode", "--instance-id", instance_id, "--kv-cache-bytes", "32MiB")
    environment = os.environ | {"PYTHONPATH": str(folder)}
    process = await asyncio.create_subprocess_exec(*COMMAND, "worker", *options, env=environment)
    try:
        async with members() as cluster:

            async def is_member() -> bool:
                assert process.returncode is None
                return instance_id in await cluster.records()

            await eventually(is_member, START_S)
            yield process.pid
            await cluster.drain(instance_id, LEAVE_S, print)
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
