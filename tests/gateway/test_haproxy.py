"""Several proxies of one cell behind HAProxy: one memory of prompts, one limit, one list of keys; one proxy is lost."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.process.ports import reserve_port
from tests.chaos.asks import picture_asks
from tests.chaos.load import keep_asking
from tests.eventually import eventually
from tests.gateway import programs
from tests.gateway.cells import Cell, cell, is_ready
from tests.gateway.conftest import Tell
from tests.proxy.sample_media import image_part, picture
from tools.soak.asking import Reply, send
from tools.soak.asks import Ask

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not os.environ.get("GATEWAY"), reason="`make gateway-test` runs HAProxy and Envoy"),
]
MAX_INFLIGHT = 12
IN_FLIGHT = 6
CONVERSATIONS = 6
KEY, LATER_KEY = "first-key", "second-key"
PAGE = Path(__file__).parents[2] / "docs" / "deploy" / "gateway.md"
CONFIGURATION = Path(__file__).with_name("haproxy.cfg")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"{KEY}\n")
    return file


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, keys: Path) -> Iterator[Cell]:
    logs = tmp_path_factory.mktemp("logs")
    with cell(logs, "2e2pd", proxies=2, max_inflight=MAX_INFLIGHT, api_key_file=keys) as running:
        yield running


@pytest.fixture(scope="module")
def balancer(pair: Cell, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of HAProxy before both proxies, with the configuration of the docs."""
    folder, port = tmp_path_factory.mktemp("haproxy"), reserve_port("127.0.0.1", 0)
    text = CONFIGURATION.read_text().replace("127.0.0.1:8080", f"127.0.0.1:{port}")
    for number, url in enumerate(pair.urls):
        text = text.replace(f"127.0.0.1:800{number}", url.removeprefix("http://"))
    (folder / "haproxy.cfg").write_text(text)
    with (folder / "log").open("wb") as log:
        command = [*programs.haproxy(), "-db", "-f", str(folder / "haproxy.cfg")]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        asyncio.run(eventually(lambda: is_ready(url) or process.poll() is not None, 20.0))
        assert process.poll() is None, (folder / "log").read_text()
        yield url
    finally:
        process.kill()
        process.wait()


def client(url: str, key: str = KEY) -> httpx.AsyncClient:
    headers, limits = {"authorization": f"Bearer {key}"}, httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=120.0, trust_env=False, limits=limits)


def chat(content: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "signpost", "messages": [{"role": "user", "content": content}], "temperature": 0, **fields}


def test_the_page_shows_the_configuration_that_is_tested() -> None:
    assert CONFIGURATION.read_text().partition("\n")[2] in PAGE.read_text()


async def test_a_conversation_finds_its_blocks_by_whichever_proxy_it_comes(
    pair: Cell, balancer: str, tell: Tell
) -> None:
    before = pair.count("triptych_proxy_affinity_total", outcome="hit")
    async with client(balancer) as http:
        for number in range(CONVERSATIONS):
            opening, cached = f"{number} " + "Tell me about the signs. " * 20, []
            for turn in ("", " And?", " And then?"):
                answer = await http.post("/v1/chat/completions", json=chat(opening + turn, max_tokens=2))
                usage = answer.raise_for_status().json()["usage"]
                cached.append(usage["prompt_tokens_details"]["cached_tokens"])
            assert min(cached[1:]) >= 64, cached
    hits = pair.count("triptych_proxy_affinity_total", outcome="hit") - before
    assert hits >= 2 * CONVERSATIONS
    asked = [pair_of(pair, url) for url in pair.urls]
    assert min(asked) >= CONVERSATIONS, "both proxies had their share"
    tell(f"HAProxy: {2 * CONVERSATIONS} further turns over two proxies, {hits:.0f} at the worker with the prompt")


async def test_a_picture_finds_its_output_by_whichever_proxy_it_comes(pair: Cell, balancer: str, tell: Tell) -> None:
    before = pair.count("triptych_encoder_output_cache_hits_total")
    pictures = [image_part(picture(f"#{number:02x}4080")) for number in range(4)]
    async with client(balancer) as http:
        for _ in range(2):
            for shown in pictures:  # an even number: each comes by both proxies, unless others come between
                question = [shown, {"type": "text", "text": "What colour is the sign?"}]
                (await http.post("/v1/chat/completions", json=chat(question, max_tokens=2))).raise_for_status()
            (await http.get("/v1/models")).raise_for_status()
    hits = pair.count("triptych_encoder_output_cache_hits_total") - before
    assert hits >= len(pictures)
    tell(f"HAProxy: {len(pictures)} pictures twice, {hits:.0f} outputs found")


async def test_the_limit_holds_for_all_proxies_together(pair: Cell, balancer: str, tell: Tell) -> None:
    body = chat("Which colours do you know?", max_tokens=400, ignore_eos=True, stream=True)
    async with client(balancer) as http:
        answers = await asyncio.gather(*(_begin(http, body) for _ in range(3 * MAX_INFLIGHT)))
        statuses = Counter(answer.status_code for answer in answers)
        await asyncio.gather(*(answer.aclose() for answer in answers))
    assert statuses == {200: MAX_INFLIGHT, 429: 2 * MAX_INFLIGHT}
    left_s = time.monotonic()
    await eventually(lambda: pair.count("triptych_proxy_inflight") == 0, 20.0)
    tell(f"HAProxy: streams that their clients left ended after {time.monotonic() - left_s:.1f} s")
    tell(f"HAProxy: {3 * MAX_INFLIGHT} streams at once, limit {MAX_INFLIGHT}: {dict(statuses)}")


async def _begin(http: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Response:
    return await http.send(http.build_request("POST", "/v1/chat/completions", json=body), stream=True)


async def test_a_key_that_is_added_works_by_all_proxies(pair: Cell, balancer: str, keys: Path) -> None:
    async with client(balancer, LATER_KEY) as http:
        refused = [(await http.get("/v1/models")).status_code for _ in range(4)]
        assert refused == [401] * 4
        await asyncio.to_thread(keys.write_text, f"{KEY}\n{LATER_KEY}\n")

        async def known() -> bool:
            return {(await http.get("/v1/models")).status_code for _ in range(4)} == {200}

        await eventually(known, 10.0)


async def test_a_killed_proxy_costs_only_the_streams_that_went_through_it(
    pair: Cell, balancer: str, tell: Tell
) -> None:
    asks = [ask for ask in picture_asks("signpost", 12) if ask.body.get("n", 1) == 1]
    (proxy,) = pair.others
    async with client(balancer) as http:
        expected = {ask.name: reply for ask in asks if (reply := await send(http, ask))}
        assert {reply.ending for reply in expected.values()} == {"whole"}, [one.error for one in expected.values()]
        got, over = list[tuple[Ask, Reply]](), asyncio.Event()
        asking = asyncio.ensure_future(keep_asking(http, asks, IN_FLIGHT, over, got))
        await eventually(lambda: len(got) >= IN_FLIGHT, 60.0)
        await asyncio.to_thread(proxy.kill)
        seen = len(got)
        await eventually(lambda: len(got) >= seen + 5 * IN_FLIGHT, 60.0)
        await asyncio.to_thread(proxy.start)
        back = len(got)
        await eventually(lambda: len(got) >= back + 5 * IN_FLIGHT, 60.0)
        over.set()
        await asking
    wrong = [ask.name for ask, reply in got if not reply.begins(expected[ask.name])]
    endings = Counter(reply.ending for _, reply in got)
    cut = [ask for ask, reply in got if reply.ending == "closed"]
    assert wrong == []
    assert len(cut) <= IN_FLIGHT
    assert all(ask.stream for ask in cut), [ask.name for ask in cut]
    assert set(endings) <= {"whole", "closed"}, [reply.error for _, reply in got if reply.ending != "whole"]
    tell(f"HAProxy: a proxy killed under {IN_FLIGHT} requests: {len(got)} asked, {dict(endings)}, 0 wrong")


def pair_of(pair: Cell, url: str) -> float:
    """How many requests a proxy has finished."""
    text = httpx.get(f"{url}/metrics", headers=pair.headers, trust_env=False).text
    lines = [line for line in text.splitlines() if line.startswith("triptych_proxy_requests_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)
