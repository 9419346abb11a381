"""A cluster of ours on three Ray nodes with addresses of their own: same answers, a node lost, encoders that come and
go with the load, two applications side by side."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from PIL import Image
from ray import serve

from common.sampling_params import SamplingParams
from engine.llm import LLM
from launch.ray.app import Arguments, Scaling, app
from tests.chaos.asks import picture_asks
from tests.chaos.load import keep_asking
from tests.equality.media import recording
from tests.eventually import eventually
from tests.launch.ray import raylets
from tests.launch.ray.burst_plot import Moment, draw
from tests.services.cluster import sign
from tests.weights.fixtures import whisper_tiny_en  # noqa: F401 (a fixture)
from tools.soak.asking import Reply, send
from tools.soak.asks import Ask

REASON = raylets.missing() if os.environ.get("RAY_CLUSTER") else "`make ray-test` runs a Ray cluster"
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(REASON), reason=REASON or "-"),
]
PORT = 8478
IN_FLIGHT = 6
IN_BURST = 12
ON_HEAD: dict[str, Any] = {"resources": {"head": 0.01}}
"""Proxy and broker stay where no node is lost."""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[raylets.Raylets]:
    folder = tmp_path_factory.mktemp("ray")
    with raylets.raylets(folder) as running:
        os.environ.update(raylets.ENVIRONMENT)
        asyncio.run(_connect(running))
        raylets.wait_for_nodes(3)
        serve.start(http_options={"host": "127.0.0.1", "port": PORT})
        yield running
        serve.shutdown()
        ray.shutdown()


async def _connect(running: raylets.Raylets) -> None:
    async def connected() -> bool:
        try:
            await asyncio.to_thread(ray.init, address=running.address, log_to_driver=False, namespace="serve")
        except (ConnectionError, RuntimeError, ValueError):
            return False
        return True

    await eventually(connected, raylets.START_S)


@contextmanager
def deployed(name: str, prefix: str, **arguments: Any) -> Iterator[httpx.Client]:
    """Run an application for the length of the block, with a client of it; ready first."""
    resources = {"proxy": {**ON_HEAD, "num_cpus": 0.1}, "broker": ON_HEAD, **arguments.pop("resources", {})}
    made = app(Arguments(cluster=name, resources=resources, settings={"engine": {"num_threads": 1}}, **arguments))
    serve.run(made, name=name, route_prefix=prefix)
    url = f"http://127.0.0.1:{PORT}{prefix}"
    try:
        with httpx.Client(base_url=url, timeout=120.0, trust_env=False) as client:

            async def ready() -> bool:
                return (await asyncio.to_thread(client.get, "/ready")).is_success

            asyncio.run(eventually(ready, 120.0))
            yield client
    finally:
        serve.delete(name)


def replicas(name: str, role: str) -> int:
    """How many replicas of a deployment run."""
    deployment = serve.status().applications[name].deployments[role]
    return sum(count for state, count in deployment.replica_states.items() if str(state) in ("RUNNING",))


def test_two_applications_answer_with_the_tokens_of_llm(nodes: raylets.Raylets) -> None:
    prompts = ["one thousand two hundred four", "de: 1204", "siebzehn"]
    expected = [output.outputs[0].text for output in LLM("numerals").generate(prompts)]
    with deployed("signs", "/", model="signpost", topology="1e1p1d") as signs:
        with deployed("numbers", "/numbers", model="numerals", topology="1e1p1d") as numbers:
            body = {"model": "numerals", "prompt": prompts, "max_tokens": 40, "temperature": 0}
            choices = numbers.post("/v1/completions", json=body).raise_for_status().json()["choices"]
            assert [choice["text"] for choice in choices] == expected
        picture = sign("red")
        url = "data:image/png;base64," + base64.b64encode(picture).decode()
        body = {"model": "signpost", "max_tokens": 8, "temperature": 0}
        body["messages"] = _question({"type": "image_url", "image_url": {"url": url}})
        choice = signs.post("/v1/chat/completions", json=body).raise_for_status().json()["choices"][0]
        params = SamplingParams(max_tokens=8, temperature=0)
        image = Image.open(io.BytesIO(picture))
        (output,) = LLM("signpost").chat(_question({"type": "image", "image": image}), params)
        assert choice["message"]["content"] == output.outputs[0].text


def test_a_lost_node_costs_no_answer(nodes: raylets.Raylets) -> None:
    """A raylet with all its workers is killed under load; replicas come up elsewhere."""
    with deployed("lossy", "/", model="signpost", topology="2e2pd") as client:
        asks = picture_asks("signpost", IN_FLIGHT)
        expected = {ask.name: reply for ask, reply in zip(asks, asyncio.run(_send_all(client, asks)), strict=True)}
        got = asyncio.run(_under_loss(client, asks, nodes))
        for ask, reply in got:
            assert reply.ending in ("whole", "refused"), f"{ask.name}: {reply.ending} {reply.error}"
            assert reply.begins(expected[ask.name]), ask.name
        assert all(reply.ending == "whole" for _, reply in got[-IN_FLIGHT:])
        print(f"{len(got)} answers, {sum(reply.ending == 'refused' for _, reply in got)} refused")
    nodes.start("right", f"--address={nodes.address}", "--num-cpus=4")
    raylets.wait_for_nodes(3)


def test_whisper_hears_on_ray_what_llm_hears(nodes: raylets.Raylets, whisper_tiny_en: Path) -> None:  # noqa: F811
    audio, _ = recording("amiable.wav")
    [expected] = LLM(whisper_tiny_en).transcribe(audio).outputs
    with deployed("speech", "/", model=str(whisper_tiny_en), topology="1e1p1d") as client:
        files, form = {"file": ("amiable.wav", audio)}, {"model": whisper_tiny_en.name, "language": "en"}
        answer = client.post("/v1/audio/transcriptions", files=files, data=form)
        assert answer.raise_for_status().json()["text"].strip() == expected.text.strip()
        assert expected.text.strip() == "He might even have been made amiable himself."


def test_encoders_come_with_a_burst_of_pictures_and_go_with_the_quiet(nodes: raylets.Raylets) -> None:
    scaling = Scaling(max_replicas=3, target_seconds=0.1, upscale_delay_s=0.0, downscale_delay_s=10.0)
    with deployed("bursts", "/", model="signpost", topology="1e1pd", scaling={"e": scaling}) as client:
        moments = asyncio.run(_burst(client))
    counts = [moment.encoders for moment in moments]
    print(f"encoders: {counts[0]}, {max(counts)} in the burst, {counts[-1]} after it, {moments[-1].seconds:.0f} s")
    if file := os.environ.get("RAY_PLOT"):
        Path(file).write_text(draw(moments))


async def _burst(client: httpx.Client) -> list[Moment]:
    """Ask about fresh pictures until a second encoder runs, and wait until one is left; return what there was when."""
    asks = [ask for ask in picture_asks("signpost", 12) if ask.name != "question 1"]
    got, over, began_s = list[tuple[Ask, Reply]](), asyncio.Event(), time.monotonic()
    moments: list[Moment] = []

    def in_flight() -> int:
        return 0 if not moments or (over.is_set() and asking.done()) else IN_BURST

    async def look() -> int:
        encoders = await asyncio.to_thread(replicas, "bursts", "encoder")
        moments.append(Moment(time.monotonic() - began_s, in_flight(), encoders))
        return encoders

    async def grown() -> bool:
        return await look() > 1

    async def shrunk() -> bool:
        return await look() == 1

    async with httpx.AsyncClient(base_url=str(client.base_url), timeout=120.0, trust_env=False) as http:
        assert await look() == 1
        asking = asyncio.ensure_future(keep_asking(http, asks, IN_BURST, over, got))
        try:
            await eventually(grown, 180.0)
            enough = len(got) + 10 * IN_BURST

            async def answered() -> bool:
                await look()
                return len(got) >= enough

            await eventually(answered, 120.0)
        finally:
            over.set()
            while not asking.done():
                await asyncio.wait([asking], timeout=0.5)
                await look()
            assert {reply.ending for _, reply in got} <= {"whole", "refused"}, [reply.error for _, reply in got]
        await eventually(shrunk, 120.0)
    return moments


async def _under_loss(client: httpx.Client, asks: list[Ask], nodes: raylets.Raylets) -> list[tuple[Ask, Reply]]:
    got, over = list[tuple[Ask, Reply]](), asyncio.Event()
    async with httpx.AsyncClient(base_url=str(client.base_url), timeout=120.0, trust_env=False) as http:
        asking = asyncio.ensure_future(keep_asking(http, asks, IN_FLIGHT, over, got))
        await eventually(lambda: len(got) >= IN_FLIGHT, 60.0)
        await asyncio.to_thread(nodes.kill, "right")
        await eventually(lambda: replicas("lossy", "encoder") < 2 or replicas("lossy", "prefill_decode") < 2, 90.0)
        await eventually(lambda: replicas("lossy", "encoder") == replicas("lossy", "prefill_decode") == 2, 120.0)
        over.set()
        await asking
    return got


async def _send_all(client: httpx.Client, asks: list[Ask]) -> list[Reply]:
    async with httpx.AsyncClient(base_url=str(client.base_url), timeout=120.0, trust_env=False) as http:
        return list(await asyncio.gather(*(send(http, ask) for ask in asks)))


def _question(picture: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [picture, {"type": "text", "text": "What colour is the sign?"}]}]
