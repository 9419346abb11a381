"""Two cells behind Envoy, with an endpoint picker over ext_proc: prefixes and media keep their cell, a draining cell
gets nothing new, a cell dies."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.keys import bearer, cluster_token
from common.process.ports import reserve_port
from tests.chaos.asks import picture_asks
from tests.chaos.load import keep_asking
from tests.eventually import eventually
from tests.gateway import programs
from tests.gateway.cells import Cell, Proxy, cell, is_ready
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
IN_FLIGHT = 8
CONVERSATIONS = 8
PICTURES = 8
CONFIGURATION = Path(__file__).with_name("envoy.yaml")


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Cell]]:
    """Two cells; the gateway has the second proxy of each, which can be killed and started again."""
    with ExitStack() as stack:
        made = []
        for name in ("left", "right"):
            logs = tmp_path_factory.mktemp(name)
            made.append(stack.enter_context(cell(logs, "1e1pd", proxies=2, cluster=name)))
        yield made


def front(one: Cell) -> Proxy:
    return one.others[0]


@pytest.fixture(scope="module")
def admin() -> str:
    """The address of Envoy's own figures."""
    return f"http://127.0.0.1:{reserve_port('127.0.0.1', 0)}"


@dataclass(frozen=True)
class Gateway:
    """Envoy before both cells, and its picker's process."""

    url: str
    picker: subprocess.Popen[bytes]


@pytest.fixture(scope="module")
def gateway(cells: list[Cell], admin: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("envoy")
    port, picker_port = (reserve_port("127.0.0.1", 0) for _ in range(2))
    urls = [front(one).url for one in cells]
    text = CONFIGURATION.read_text().replace("port_value: 8080", f"port_value: {port}")
    own_ports = [*(front(one).port for one in cells), picker_port, int(admin.rpartition(":")[2])]
    for number, own in enumerate(own_ports):
        text = text.replace(f"port_value: 800{number}", f"port_value: {own}")
    (folder / "envoy.yaml").write_text(text)
    picker = [os.environ["GATEWAY"], str(Path(__file__).with_name("picker.py")), str(picker_port), *urls]
    envoy = [*programs.envoy(), "-c", str(folder / "envoy.yaml"), "--use-dynamic-base-id", "--log-level", "warn"]
    running: list[subprocess.Popen[bytes]] = []

    def start(name: str, command: list[str], answers: Callable[[], bool]) -> None:
        with (folder / f"{name}.log").open("wb") as log:
            running.append(subprocess.Popen(command, stdout=log, stderr=log))
        asyncio.run(eventually(lambda: answers() or running[-1].poll() is not None, 30.0))
        assert running[-1].poll() is None, (folder / f"{name}.log").read_text()[-3000:]

    url = f"http://127.0.0.1:{port}"
    try:
        start("picker", picker, lambda: listens(picker_port))
        start("envoy", [*envoy, "--concurrency", "1"], lambda: is_ready(url))
        yield Gateway(url, running[0])
    finally:
        for one in running:
            one.kill()
            one.wait()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
async def http(gateway: Gateway) -> Any:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=120.0, trust_env=False) as client:
        yield client


def chat(content: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "signpost", "messages": [{"role": "user", "content": content}], "temperature": 0, **fields}


async def cell_of(http: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Ask, and return which cell answered, and what."""
    answer = (await http.post("/v1/chat/completions", json=body)).raise_for_status()
    return answer.headers["x-cell"], answer.json()


async def test_a_conversation_stays_in_its_cell(http: httpx.AsyncClient, tell: Tell) -> None:
    openings = [f"{number} " + "Tell me about the signs. " * 20 for number in range(CONVERSATIONS)]
    homes = [(await cell_of(http, chat(opening, max_tokens=2)))[0] for opening in openings]
    assert min(Counter(homes).values()) >= CONVERSATIONS // 4
    assert len(set(homes)) == 2
    hits = 0
    for turn in (" And?", " And then?"):
        for home, opening in zip(homes, openings, strict=True):
            there, answer = await cell_of(http, chat(opening + turn, max_tokens=2))
            assert there == home
            hits += answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
    assert hits == 2 * CONVERSATIONS
    tell(f"Envoy: {2 * CONVERSATIONS} further turns, {hits} in the cell with their beginning in its cache")


async def test_a_picture_stays_in_the_cell_that_has_encoded_it(
    http: httpx.AsyncClient, cells: list[Cell], tell: Tell
) -> None:
    name = "triptych_encoder_output_cache_hits_total"
    before = sum(one.count(name) for one in cells)
    questions = ("What colour is the sign?", "What does the sign say?", "What shape is the sign?")
    for number in range(PICTURES):
        shown = image_part(picture(f"#40{number:02x}80"))
        asked = [chat([{"type": "text", "text": text}, shown], max_tokens=2) for text in questions]
        homes = {(await cell_of(http, body))[0] for body in asked}
        assert len(homes) == 1
    hits = sum(one.count(name) for one in cells) - before
    assert hits == 2 * PICTURES
    tell(f"Envoy: {PICTURES} pictures asked about three times, {hits:.0f} of {2 * PICTURES} outputs found again")


async def test_a_draining_cell_gets_nothing_new_and_ends_what_it_has(
    http: httpx.AsyncClient, cells: list[Cell], tell: Tell
) -> None:
    draining = front(cells[0])
    body = chat("0 " + "Tell me about the signs. " * 20, max_tokens=300, ignore_eos=True, return_token_ids=True)
    home, whole = await cell_of(http, body)
    if home != draining.url.removeprefix("http://"):
        draining = front(cells[1])
    async with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
        assert answer.headers["x-cell"] == home
        lines = answer.aiter_lines()
        await anext(lines)
        token = cluster_token(draining.cluster.supervisor.plan.settings)
        assert token is not None
        headers = {"authorization": bearer(token)}
        (await http.post(f"{draining.url}/drain", params={"wait": 0}, headers=headers)).raise_for_status()
        await eventually(lambda: not is_ready(draining.url))
        # The picker looks five times a second.
        await eventually(lambda: _answers_elsewhere(http, body | {"max_tokens": 1}, home), 5.0)
        others = Counter([(await cell_of(http, body | {"max_tokens": 1}))[0] for _ in range(10)])
        assert home not in others
        assert [line async for line in lines if line][-1] == "data: [DONE]"
    assert whole["choices"][0]["finish_reason"] == "length"
    await asyncio.to_thread(draining.kill)
    await asyncio.to_thread(draining.start)
    await eventually(lambda: _answers_there(http, home), 20.0)
    tell("Envoy: a cell drained with a stream under way: 10 of 10 new requests elsewhere, the stream whole")


async def _answers_elsewhere(http: httpx.AsyncClient, body: dict[str, Any], home: str) -> bool:
    return (await cell_of(http, body))[0] != home


async def _answers_there(http: httpx.AsyncClient, home: str) -> bool:
    salt = os.urandom(300).hex()  # a beginning that nobody knows, and so by turns
    return (await cell_of(http, chat(salt, max_tokens=1)))[0] == home


async def test_requests_of_a_cell_that_dies_are_answered_by_the_other(
    http: httpx.AsyncClient, cells: list[Cell], admin: str, tell: Tell
) -> None:
    asks = [ask for ask in picture_asks("signpost", 12) if ask.body.get("n", 1) == 1]
    asks = [replace(ask, stream=number % 3 == 0) for number, ask in enumerate(asks)]
    expected = {ask.name: await send(http, ask) for ask in asks}
    assert {reply.ending for reply in expected.values()} == {"whole"}, [one.error for one in expected.values()]
    got, over = list[tuple[Ask, Reply]](), asyncio.Event()
    asking = asyncio.ensure_future(keep_asking(http, asks, IN_FLIGHT, over, got))
    await eventually(lambda: len(got) >= IN_FLIGHT, 60.0)
    await eventually(lambda: _is_busy(front(cells[1])), 30.0)
    await asyncio.to_thread(_kill, cells[1])
    seen = len(got)
    await eventually(lambda: len(got) >= seen + 5 * IN_FLIGHT, 90.0)
    await asyncio.to_thread(front(cells[1]).start)
    back = len(got)
    await eventually(lambda: len(got) >= back + 5 * IN_FLIGHT, 90.0)
    over.set()
    await asking
    endings = Counter(reply.ending for _, reply in got)
    cut = [ask for ask, reply in got if reply.ending != "whole"]
    assert [ask.name for ask, reply in got if not reply.begins(expected[ask.name])] == []
    assert len(cut) <= IN_FLIGHT
    assert all(ask.stream for ask in cut), [(ask.name, reply.error) for ask, reply in got if reply.ending != "whole"]
    statistics = (await http.get(f"{admin}/stats", params={"filter": "cells.upstream_rq_retry"})).text.split("\n")
    counts = {name: int(value) for name, _, value in (line.rpartition(": ") for line in statistics) if value.isdigit()}
    retried = counts["cluster.cells.upstream_rq_retry_success"]
    assert retried > 0
    figures = f"{len(got)} asked, {dict(endings)}, {retried} retried in the other cell, 0 wrong"
    tell(f"Envoy: a cell killed under {IN_FLIGHT} requests: {figures}")


async def test_without_its_picker_both_cells_answer_by_turns(http: httpx.AsyncClient, gateway: Gateway) -> None:
    gateway.picker.kill()
    await asyncio.to_thread(gateway.picker.wait)
    homes = [(await cell_of(http, chat("Which colours do you know?", max_tokens=1)))[0] for _ in range(6)]
    assert len(set(homes)) == 2


def _is_busy(proxy: Proxy) -> bool:
    """Whether a few requests are under way: some without an answer yet, which others can have."""
    lines = httpx.get(f"{proxy.url}/metrics", trust_env=False).text.splitlines()
    return any(line.startswith("triptych_proxy_inflight ") and float(line.split()[1]) >= 3 for line in lines)


def _kill(dying: Cell) -> None:
    """Every process of the cell that clients' requests are in, at once; its supervisor starts the workers again."""
    for instance in dying.cluster.instances.values():
        if instance.child is not None and instance.role != "proxy":
            os.kill(instance.child.pid, signal.SIGKILL)
    front(dying).kill()
