"""A cluster of real processes that has too much to do, or whose engine hangs in the middle of answers."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import openai
import pytest
from redis import Redis

from common.config import EngineConfig, Settings
from common.model_info import load_model_info
from launch.cluster.instance import Reporter
from launch.cluster.local_cluster import LocalCluster
from tests.broker.conftest import broker_url
from tests.equality.cases import Case
from tests.equality.media import data_url
from tests.equality.served import START_TIMEOUT_S, Served
from tests.eventually import eventually
from tests.launch.cli.hanging import HangingPlan
from tests.media_files import encoded
from tools.signpost import scenes

__all__ = ["broker_url"]
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
STEP_TIMEOUT_S = 2.0
"""For steps of a few milliseconds."""
NUM_PICTURES = 4
MAX_TOKENS = 250
MOVE_S = 60.0
REFUSAL_S = 60.0


class Deaths(Reporter):
    """Keeps what is told of processes that have ended."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def event(self, text: str, *, good: bool | None = None, log_tail: str = "", then: str = "") -> None:
        if good is False:
            self.told.append((text, log_tail))


@pytest.fixture(scope="module")
def deaths() -> Deaths:
    return Deaths()


@pytest.fixture(scope="module")
def served(broker_url: str, deaths: Deaths) -> Iterator[Served]:
    """signpost as 1e2pd, whose workers hang when they are told to, and where no line may stand."""
    settings = Settings(
        model="signpost",
        port=0,
        broker=broker_url,
        cluster="hanging",
        topology="1e2pd",
        log_level="warning",
        step_timeout_s=STEP_TIMEOUT_S,
        max_queue_s=0.001,
        allow_private_media_urls=True,
        engine=EngineConfig(num_threads=1, kv_cache_bytes=48 * 2**20),
    )
    cluster = LocalCluster(settings, reporter=deaths, start_timeout_s=START_TIMEOUT_S)
    cluster.supervisor.plan = HangingPlan(**vars(cluster.supervisor.plan))
    with Redis.from_url(broker_url) as redis, cluster:
        yield Served(cluster, redis, load_model_info("signpost"))


def make_case(url: str) -> Case:
    """A question about one picture; the answer goes on as long as it may."""
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What does the sign say?"}]
    http = {"messages": [{"role": "user", "content": content}], "extra_body": {"ignore_eos": True}}
    return Case([], [], http=http)


def make_cases(count: int, seed: int) -> list[Case]:
    """About pictures that nobody has seen before."""
    rng = random.Random(seed)
    return [make_case(data_url(scenes.render(rng, scenes.SIZES[0], "test").image)) for _ in range(count)]


class Pictures(ThreadingHTTPServer):
    """Has one picture, and counts how often it is asked for."""

    def __init__(self) -> None:
        self.data = encoded(scenes.render(random.Random(1), scenes.SIZES[0], "test").image)
        self.num_fetched = 0
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/sign.png"


class _Handler(BaseHTTPRequestHandler):
    server: Pictures

    def do_GET(self) -> None:
        self.server.num_fetched += 1
        self.send_response(200)
        self.send_header("Content-Type", "image/png")
        self.send_header("Content-Length", str(len(self.server.data)))
        self.end_headers()
        self.wfile.write(self.server.data)

    def log_message(self, *_: object) -> None: ...


@contextmanager
def pictures() -> Iterator[Pictures]:
    with Pictures() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@asynccontextmanager
async def crowd(served: Served, client: openai.AsyncOpenAI) -> AsyncIterator[None]:
    """So many who ask at once, each again as soon as it is answered or refused, that a line stands."""
    cases, over = itertools.cycle(make_cases(64, seed=64)), asyncio.Event()

    async def ask() -> None:
        while not over.is_set():
            with suppress(openai.RateLimitError):
                await served.answer(client, next(cases), 4)

    async with asyncio.TaskGroup() as group:
        for _ in range(32):
            group.create_task(ask())
        try:
            yield
        finally:
            over.set()


async def test_who_comes_to_a_line_that_stands_is_sent_away_before_the_media_are_fetched(served: Served) -> None:
    answers, refusal = 0, None
    with pictures() as host:
        async with served.client() as client, crowd(served, client), asyncio.timeout(REFUSAL_S):
            while refusal is None:
                try:
                    await served.answer(client, make_case(host.url), 1)
                    answers += 1
                except openai.RateLimitError as error:
                    refusal = error
        assert host.num_fetched == answers
    assert "max_queue_s" in refusal.message
    assert int(refusal.response.headers["retry-after"]) >= 1
    await served.wait_until_nothing_is_held()


async def test_answers_go_on_elsewhere_when_an_engine_hangs_and_no_picture_is_encoded_again(
    served: Served, deaths: Deaths
) -> None:
    cases = make_cases(NUM_PICTURES, seed=4)
    encoded = served.gauges("e0")["encoder_items_total"]
    undisturbed = await served.answer_all(cases, MAX_TOKENS)
    async with served.client() as client:
        begun = [asyncio.Event() for _ in cases]
        answering = [
            asyncio.create_task(served.stream(client, case, MAX_TOKENS, event))
            for case, event in zip(cases, begun, strict=True)
        ]
        for event in begun:
            await event.wait()
        busy = max(("pd0", "pd1"), key=lambda name: served.gauges(name)["requests_running"])
        pid = served.cluster.instances[busy].pid
        assert pid is not None
        os.kill(pid, signal.SIGUSR2)
        async with asyncio.timeout(MOVE_S):
            answers = await asyncio.gather(*answering)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in undisturbed]
    assert [answer.finish_reason for answer in answers] == ["length"] * NUM_PICTURES
    await eventually(lambda: deaths.told != [], 20.0)  # answers may be there before its end has been seen
    assert [text for text, _ in deaths.told] == [f"{busy} died (exit code 1). Its last lines:"]
    assert "the engine has been in one step for" in deaths.told[0][1]
    encoder = served.gauges("e0")
    assert encoder["encoder_items_total"] - encoded == NUM_PICTURES
    assert encoder["encoder_output_cache_hits_total"] > 0
    await eventually(lambda: served.cluster.instances[busy].state == "ready", START_TIMEOUT_S)
    assert served.cluster.instances[busy].pid != pid
    await served.wait_until_nothing_is_held()
