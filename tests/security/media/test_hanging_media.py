"""One client's media hang: others are answered all the same, and nobody is blamed for a place that there was not."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from common.config import Settings
from common.errors import TriptychError
from proxy.media import addresses, fetch
from proxy.media.fair_semaphore import FairSemaphore, Share, SlotTimeout
from proxy.media.fetch import Fetcher
from tests.proxy.conftest import ProxyHarness, eventually, serve
from tests.proxy.media.test_media import web_server
from tests.proxy.sample_media import picture

pytestmark = pytest.mark.slow

__all__ = ["serve"]

GET_ADDRESSES = socket.getaddrinfo
PNG = picture()
GOOD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(PNG), PNG)


def parts(*urls: str) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": url}} for url in urls]


def places(rig: ProxyHarness) -> FairSemaphore:
    return rig.service.intake._fetcher.slots


@asynccontextmanager
async def hanging_requests(rig: ProxyHarness, url: str, num: int = 8) -> AsyncIterator[None]:
    """So many requests of 16 media each, until their client leaves."""
    content = [parts(*(url.format(f"{request}-{item}") for item in range(16))) for request in range(num)]
    tasks = [asyncio.create_task(rig.chat(each)) for each in content]
    try:
        await eventually(lambda: places(rig).num_free < 24 and len(places(rig).waiting) == num)
        yield
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_bystander_is_answered_while_all_urls_of_eight_requests_hang(serve):
    limits = {"allow_private_media_urls": True, "media_timeout_s": 60}
    async with web_server(lambda path: GOOD if path == "/good" else b"") as url, serve(**limits) as rig:
        async with hanging_requests(rig, url + "/{}"):
            for _ in range(3):
                answer = await rig.chat(parts(f"{url}/good"))
                assert answer.choices[0].message.content == "a red sign"
        await eventually(lambda: places(rig).num_free == places(rig).num_slots)


@pytest.fixture
def slow_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Names below slow.example are looked up until this is set."""
    answered = threading.Event()

    def look_up(host: str | bytes | None, *args: Any, **options: Any) -> Any:
        if isinstance(host, str) and host.endswith(".slow.example"):
            answered.wait(60)
            raise socket.gaierror("no such host")
        return GET_ADDRESSES(host, *args, **options)

    monkeypatch.setattr(addresses.socket, "getaddrinfo", look_up)
    yield answered
    answered.set()


async def test_a_bystander_is_answered_while_all_names_of_eight_requests_hang(serve, slow_names):
    limits = {"allow_private_media_urls": True, "media_timeout_s": 60}
    async with web_server(lambda path: GOOD) as url, serve(**limits) as rig:
        async with hanging_requests(rig, "http://{}.slow.example/"):
            for _ in range(3):
                assert (await rig.chat(parts(f"{url}/good"))).choices[0].message.content == "a red sign"
        assert places(rig).num_free < 24  # the look-ups go on without their requests
        assert (await rig.chat(parts(f"{url}/good"))).choices[0].message.content == "a red sign"
        slow_names.set()
        await eventually(lambda: places(rig).num_free == places(rig).num_slots)


async def test_who_gets_no_place_is_asked_to_come_back_and_not_blamed(serve, monkeypatch):
    monkeypatch.setattr(fetch, "_SLOTS", 1)
    limits = {"allow_private_media_urls": True, "media_timeout_s": 3.0}
    async with web_server(lambda path: GOOD if path == "/good" else b"") as url, serve(**limits) as rig:
        answers = await asyncio.gather(*(rig.chat(parts(f"{url}/{n}")) for n in range(8)), return_exceptions=True)
        refused = [error for error in answers if isinstance(error, openai.RateLimitError)]
        blamed = [error for error in answers if isinstance(error, openai.BadRequestError)]
        assert len(refused) + len(blamed) == 8
        assert refused
        assert blamed
        for error in refused:
            assert error.response.headers["retry-after"] == "1"
            assert "none of these places has come free" in error.message
        for error in blamed:
            assert "took longer than 3 s" in error.message
        assert rig.count("refused_total", reason="fetches") == len(refused)
        assert (await rig.chat(parts(f"{url}/good"))).choices[0].finish_reason == "stop"


async def test_the_time_of_a_fetch_begins_with_its_place(monkeypatch):
    monkeypatch.setattr(fetch, "_SLOTS", 1)
    monkeypatch.setattr(fetch, "_SLOT_GRACE_S", 20.0)
    fetcher = Fetcher(Settings(allow_private_media_urls=True, media_timeout_s=1.0))
    async with web_server(lambda path: GOOD if path == "/good" else b"") as url:
        hanging = asyncio.create_task(fetcher.fetch(f"{url}/", "image_url", 10_000))
        await eventually(lambda: fetcher.slots.num_free == 0)
        assert await fetcher.fetch(f"{url}/good", "image_url", 10_000) == PNG
        with pytest.raises(TriptychError, match="took longer than 1 s"):
            await hanging
    fetcher.close()


async def test_a_name_that_hangs_has_its_place_until_it_is_known_and_then_gives_it_back(monkeypatch, slow_names):
    monkeypatch.setattr(fetch, "_SLOTS", 2)
    monkeypatch.setattr(fetch, "_SLOT_GRACE_S", 0.2)
    fetcher = Fetcher(Settings(allow_private_media_urls=True, media_timeout_s=0.5))
    async with web_server(lambda path: GOOD) as url:
        hanging = [fetcher.fetch(f"http://{n}.slow.example/", "image_url", 1000) for n in range(2)]
        for outcome in await asyncio.gather(*hanging, return_exceptions=True):
            assert isinstance(outcome, TriptychError)
            assert "took longer than 0.5 s" in str(outcome)
        with pytest.raises(SlotTimeout):
            await fetcher.fetch(url, "image_url", 10_000)
        slow_names.set()
        await eventually(lambda: fetcher.slots.num_free == 2)
        assert await fetcher.fetch(url, "image_url", 10_000) == PNG
    assert fetcher.slots.num_free == 2
    fetcher.close()


async def test_places_come_back_however_fetches_end(monkeypatch):
    monkeypatch.setattr(fetch, "_SLOTS", 3)
    pages = {"/good": GOOD, "/404": b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "/odd": b"no HTTP\r\n\r\n"}
    fetcher = Fetcher(Settings(allow_private_media_urls=True, media_timeout_s=0.3))
    async with web_server(lambda path: pages.get(path, b"")) as url:
        for path in ("/good", "/404", "/odd", "/hangs", "/good", "/odd"):
            share = Share(fetcher.slots)
            fetches = [asyncio.create_task(fetcher.fetch(url + path, "x", 10_000, share=share)) for _ in range(5)]
            await asyncio.sleep(0.05)
            for task in fetches[::2]:
                task.cancel()
            with contextlib.suppress(TriptychError):
                await fetcher.fetch(url + path, "x", 10, share=share)
            await asyncio.gather(*fetches, return_exceptions=True)
            assert (fetcher.slots.num_free, share.num_held) == (3, 0)
    fetcher.close()
