"""A proxy that is to leave: not ready, alive, and done when nothing is under way."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import TriptychError
from common.http import drain
from common.keys import ClusterKey, bearer
from launch.cli.members import Members
from proxy.server import request_context
from tests.proxy.conftest import eventually

KEY = "ab" * 32


@pytest.fixture(autouse=True)
def short_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_context, "QUIET_S", 0.1)


async def test_a_drain_returns_when_nothing_is_under_way_and_cuts_nobody_off(serve):
    async with serve() as rig:
        rig.cluster.decoders[0].pause_after = 1
        stream = await rig.chat(stream=True)
        chunks = aiter(stream)
        await anext(chunks)
        assert (await rig.http.post("/drain")).json() == {"status": "draining", "outstanding": 1}
        ready = await rig.http.get("/ready")
        assert (ready.status_code, ready.json()["reason"]) == (503, "draining: it finishes what it has")
        assert (await rig.http.get("/health")).status_code == 200
        still = await rig.http.post("/drain", params={"wait": "0.2"})
        assert (still.status_code, still.json()["outstanding"]) == (202, 1)
        draining = asyncio.create_task(rig.http.post("/drain", params={"wait": "30"}))
        await asyncio.wait({draining}, timeout=0.3)
        assert not draining.done()
        await stream.close()
        done = await draining
        assert (done.status_code, done.json()) == (200, {"status": "drained", "outstanding": 0})


async def test_a_request_that_comes_all_the_same_is_served(serve):
    async with serve() as rig:
        await rig.http.post("/drain")
        assert (await rig.chat()).choices


async def test_others_see_in_the_registry_that_a_proxy_drains(serve):
    async with serve() as rig:
        assert not rig.service.pool.own.draining
        await rig.http.post("/drain")
        name = rig.service.instance_id
        await eventually(lambda: rig.service.pool.seen[name].draining)
        instances = (await rig.http.get("/v1/cluster")).json()["instances"]
        assert {one["id"]: one["state"] for one in instances}[name] == "draining"


async def test_a_draining_proxy_sends_clients_that_keep_their_connections_to_another(serve):
    async with serve() as rig:
        body = {"model": rig.service.model_name, "prompt": "hi", "max_tokens": 2}
        assert "connection" not in (await rig.http.post("/v1/completions", json=body)).headers
        await rig.http.post("/drain")
        served = await rig.http.post("/v1/completions", json=body)
        assert (served.status_code, served.headers["connection"]) == (200, "close")


async def test_a_containers_last_command_returns_when_nothing_is_under_way(serve, monkeypatch):
    async with serve() as rig:
        monkeypatch.setenv("TRIPTYCH_PORT", str(rig.http.base_url.port))
        rig.cluster.decoders[0].pause_after = 1
        stream = await rig.chat(stream=True)
        await anext(aiter(stream))
        assert await asyncio.to_thread(drain.main, "0.2") == '{"status":"draining","outstanding":1}'
        await stream.close()
        assert await asyncio.to_thread(drain.main, "30") is None


async def test_a_containers_last_command_shows_the_clusters_token(serve, monkeypatch):
    async with serve(encoders=0, decoders=0, cluster_key=KEY) as rig:
        monkeypatch.setenv("TRIPTYCH_PORT", str(rig.http.base_url.port))
        assert await asyncio.to_thread(drain.main, "1") == "cannot drain: HTTP Error 401: Unauthorized"
        monkeypatch.setenv("TRIPTYCH_CLUSTER_KEY", KEY)
        assert await asyncio.to_thread(drain.main, "30") is None


@pytest.mark.parametrize("wait", ["-1", "nan", "inf", "soon", "1e9"])
async def test_a_wrong_wait_is_named_and_drains_nothing(serve, wait):
    async with serve() as rig:
        answer = await rig.http.post("/drain", params={"wait": wait})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "wait")
        await eventually(lambda: not rig.service.not_ready())


async def test_only_the_clusters_token_drains_a_proxy_of_a_cluster_with_a_key(serve):
    token = ClusterKey(KEY).token
    async with serve(encoders=0, decoders=0, cluster_key=KEY, api_key="of-a-user") as rig:
        for key, status, said in (("of-a-user", 401, "use `triptych drain"), (token, 202, "draining")):
            answer = await rig.http.post("/drain", headers={"authorization": bearer(key)})
            assert answer.status_code == status
            assert said in answer.text


async def test_the_command_waits_for_a_proxy_and_says_what_is_left(serve):
    told: list[str] = []
    async with serve() as rig, Members(rig.service.settings) as members:
        proxy = rig.service.instance_id
        rig.cluster.decoders[0].pause_after = 1
        stream = await rig.chat(stream=True)
        await anext(aiter(stream))
        with pytest.raises(TriptychError, match=f"{proxy}: after 0.2 s it still has 1 request, and goes on draining"):
            await members.drain(proxy, 0.2, told.append)
        assert told == []
        await stream.close()
        await members.drain(proxy, 30.0, told.append)
    assert told == [f"{proxy} has nothing under way; end it by SIGTERM"]


async def test_an_answer_that_a_stopping_server_cannot_finish_is_503_as_others_that_come_then(serve):
    async with serve() as rig:
        rig.cluster.decoders[0].pause_after = 1
        rig.server.config.timeout_graceful_shutdown = 0
        answer = asyncio.create_task(rig.http.post("/v1/completions", json={"prompt": "hi"}))
        await eventually(lambda: rig.service.admission.inflight == 1)
        rig.server.stop()
        refused = await answer
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert refused.headers["retry-after"] == "1"
