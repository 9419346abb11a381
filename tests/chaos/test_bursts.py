"""More at once than there is room for, all of it given up at once, and a client that takes nothing."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest

from proxy.dispatch.job_runner import MAX_UNREAD
from tests.chaos.asks import salted, sign_asks
from tests.chaos.harness import ChaosHarness, arena
from tests.eventually import eventually
from tools.soak.asking import send
from tools.soak.asks import Ask
from tools.soak.leak_check import gauges, held
from tools.soak.memory import processes, resident_bytes

pytestmark = [pytest.mark.cluster, pytest.mark.chaos]
BURST = 200
TOKENS_OF_A_SIGN = 16
BYTES_OF_A_SIGN = TOKENS_OF_A_SIGN * 256 * 4
ROOM = 4
ALLOCATOR_BYTES = 3 * 2**20
"""What a process may have more after a burst than after the one before. Mostly it is less than 2 MiB."""
LETTING_GO_S = 1.0
"""A look that begins later than that after the end finds nothing held any more."""
BURSTS = 5
"""One may happen to take more at a time than the one before; what leaks grows in each of them."""
UNREAD_BYTES = 16 * 2**20
"""What a proxy may have of answers that nobody reads: some thousand pieces of a few hundred bytes, and buffers."""
UNREAD_TOKENS = 2 * MAX_UNREAD
"""What may be made of such an answer: what the proxy keeps, and what the connection has taken, pieces of 250 bytes."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosHarness]:
    """One encoder, one decoder with room for four pictures."""
    folder = tmp_path_factory.mktemp("small")
    with arena(folder, "signpost", "1e1pd", sign_asks, count=8, encoder_cache_bytes=ROOM * BYTES_OF_A_SIGN) as ready:
        yield ready


async def test_two_hundred_pictures_with_room_for_four_are_two_hundred_answers(small: ChaosHarness) -> None:
    asks = [salted(small.asks[number % len(small.asks)], f"burst {number}") for number in range(BURST)]
    async with small.client() as http:
        replies = await asyncio.gather(*(send(http, ask) for ask in asks))
    wrong = [small.fault_of(ask, reply) for ask, reply in zip(asks, replies, strict=True)]
    assert not [what for what in wrong if what]
    decoder = _decoder(small)
    assert decoder["encoder_cache_bytes_peak"] <= ROOM * BYTES_OF_A_SIGN
    assert decoder["inputs_stored_total"] >= BURST
    await small.wait_until_nothing_is_held()


async def test_two_hundred_given_up_at_once_leave_nothing_a_second_later(small: ChaosHarness) -> None:
    await _give_up_two_hundred(small, "before")  # now everything is about as large as so many make it
    sizes = [await _least_resident(small)]
    grown = {name: [ALLOCATOR_BYTES + 1] for name in sizes[0]}
    while len(sizes) <= BURSTS and any(min(bursts) > ALLOCATOR_BYTES for bursts in grown.values()):
        await _give_up_two_hundred(small, f"given up {len(sizes)}")
        sizes.append(await _least_resident(small))
        for name, size in sizes[-1].items():
            grown[name].append(size - sizes[-2][name])
    assert max(map(min, grown.values())) <= ALLOCATOR_BYTES, grown
    decoder = _decoder(small)
    assert decoder["encoder_cache_references"] == 0
    assert decoder["encoder_cache_bytes_used"] <= ROOM * BYTES_OF_A_SIGN  # what had come stays for the next one


async def _give_up_two_hundred(small: ChaosHarness, salt: str) -> None:
    """Ask for 200 long answers, leave all of them at once, and see that a second later nothing is held."""
    asks = [salted(_long(small.asks[number % len(small.asks)]), f"{salt} {number}") for number in range(BURST)]
    async with small.client() as http:
        tasks = [asyncio.create_task(send(http, ask)) for ask in asks]
        await eventually(lambda: _proxy(small)["proxy_flights"] == BURST, 60.0)
        await eventually(lambda: _decoder(small)["requests_running"] >= 1, 30.0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    given_up_s = time.monotonic()
    while True:
        looked_s = time.monotonic() - given_up_s  # a look itself takes a while
        found = await asyncio.to_thread(held, small.cluster)
        if not found:
            return
        assert looked_s < LETTING_GO_S, f"still held {looked_s:.1f} s later: {found}"


async def test_a_client_that_reads_nothing_holds_up_nobody_and_no_memory_and_gets_few_tokens(
    small: ChaosHarness,
) -> None:
    endless = _long(small.asks[0], choices=16)  # of up to 24,000 tokens
    before, made = _resident(small)["proxy"], _decoder(small)["generated_tokens_total"]
    with _deaf_client(small, endless):
        await eventually(lambda: _decoder(small)["requests_running"] >= 1, 30.0)
        async with small.client() as http:
            replies = await asyncio.gather(*(send(http, ask) for ask in small.asks))
        wrong = [small.fault_of(ask, reply) for ask, reply in zip(small.asks, replies, strict=True)]
        assert not [what for what in wrong if what]
        await eventually(lambda: _decoder(small)["requests_running"] == 0, 60.0)  # though its client is still there
        assert _decoder(small)["generated_tokens_total"] - made < UNREAD_TOKENS  # those of the others included
        assert _resident(small)["proxy"] - before < UNREAD_BYTES
    await small.wait_until_nothing_is_held()


def _long(ask: Ask, choices: int = 1) -> Ask:
    """The same question with an answer as long as the context allows."""
    sampled = {"n": choices, "temperature": 1.0, "seed": 1} if choices > 1 else {}
    length = {"max_tokens": 1500, "min_tokens": 1500}  # not ignore_eos: ends of text are tokens, but no text to send
    return replace(ask, body=ask.body | length | sampled, stream=True)


def _resident(small: ChaosHarness) -> dict[str, int]:
    """Bytes in memory of each process of the cluster."""
    return {name: size for name, pid in processes(small.cluster) if (size := resident_bytes(pid)) is not None}


async def _least_resident(small: ChaosHarness) -> dict[str, int]:
    """The least that each process has within a second: free memory goes back when a process has become idle."""
    least = _resident(small)
    deadline_s = time.monotonic() + 1.0
    while time.monotonic() < deadline_s:
        await asyncio.sleep(0.05)
        least = {name: min(size, least.get(name, size)) for name, size in _resident(small).items()}
    return least


def _decoder(small: ChaosHarness) -> dict[str, float]:
    return gauges(small.cluster.instances["pd0"], small.cluster.supervisor.plan.settings)


def _proxy(small: ChaosHarness) -> dict[str, float]:
    return gauges(small.cluster.instances["proxy"], small.cluster.supervisor.plan.settings)


def _deaf_client(small: ChaosHarness, ask: Ask) -> socket.socket:
    """A connection on which a request has been sent and nothing is ever read."""
    url = httpx.URL(small.cluster.base_url)
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.connect((url.host, url.port or 0))
    body = json.dumps(ask.body | {"stream": True}).encode()
    head = f"POST {ask.path} HTTP/1.1\r\nHost: {url.host}\r\nContent-Type: application/json\r\n"
    deaf.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return deaf
