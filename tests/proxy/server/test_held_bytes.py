"""Bodies and media of all requests together stay within one budget, and everything goes back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from proxy.server.limits import Reservation
from tests.proxy.conftest import ProxyHarness, eventually
from tests.proxy.media.test_media import web_server
from tests.proxy.sample_media import audio_part, image_part, picture, speech
from tests.proxy.server.test_connections import connections, head

KIB = 2**10


def chat_body(content: object = "x", size: int = 0) -> bytes:
    """A conversation, made as long as is wanted by blanks behind it."""
    return json.dumps({"messages": [{"role": "user", "content": content}]}).encode().ljust(size)


async def post(
    rig: ProxyHarness, body: bytes | AsyncIterator[bytes], path: str = "/v1/chat/completions"
) -> httpx.Response:
    return await rig.http.post(path, content=body)


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes held in all, after every reservation."""
    seen: list[int] = []
    reserve = Reservation.reserve

    def note(reservation: Reservation, num_bytes: int) -> None:
        reserve(reservation, num_bytes)
        seen.append(reservation.budget.held_bytes)

    monkeypatch.setattr(Reservation, "reserve", note)
    return seen


async def test_many_large_bodies_at_once_stay_within_the_budget(serve, peaks):
    async with serve(max_inflight_bytes=1024 * KIB) as rig:
        body = chat_body([image_part(picture())], 200 * KIB)
        answers = await asyncio.gather(*(post(rig, body) for _ in range(50)))
        statuses = {answer.status_code for answer in answers}
        assert statuses == {200, 429}
        for answer in answers:
            if answer.status_code == 429:
                assert answer.headers["retry-after"] == "1"
                assert "max_inflight_bytes" in answer.json()["error"]["message"]
        assert 800 * KIB < max(peaks) <= 1024 * KIB
        assert rig.count("refused_total", reason="bytes") == sum(answer.status_code == 429 for answer in answers)
        await rig.assert_clean()
        assert rig.count("held_bytes") == 0
        assert (await post(rig, body)).status_code == 200


async def test_a_body_is_refused_by_its_declared_length_before_it_is_read(serve):
    async with serve(max_inflight_bytes=100 * KIB) as rig, connections(rig, 3) as opened:
        for (_, writer), size in zip(opened, (60 * KIB, 50 * KIB, 101 * KIB), strict=True):
            writer.write(head("/v1/chat/completions", size))
            await writer.drain()
            if size == 60 * KIB:
                await eventually(lambda: rig.count("held_bytes") == 60 * KIB)
        assert b" 429 " in await opened[1][0].readline()
        assert b" 413 " in await opened[2][0].readline()  # which could never be held
        opened[0][1].close()
        await eventually(lambda: rig.count("held_bytes") == 0)


async def test_a_body_of_unknown_length_takes_room_as_it_comes(serve):
    async with serve(max_inflight_bytes=100 * KIB) as rig, connections(rig, 1) as [(reader, writer)]:
        chunk = b"%x\r\n%b\r\n" % (40 * KIB, b" " * 40 * KIB)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk)
        await eventually(lambda: rig.count("held_bytes") == 40 * KIB)
        assert (await post(rig, chat_body(size=61 * KIB))).status_code == 429
        assert (await post(rig, chat_body(size=20 * KIB))).status_code == 200
        writer.write(2 * chunk)
        assert b" 413 " in await reader.readline()


async def test_fetched_media_take_room_too(serve):
    unsized = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + picture() + bytes(80 * KIB)
    sized = b"HTTP/1.1 200 OK\r\nContent-Length: 90000\r\n\r\n" + picture()
    pages = {"/unsized": unsized, "/sized": sized}
    async with (
        web_server(pages.__getitem__) as url,
        serve(max_inflight_bytes=64 * KIB, allow_private_media_urls=True) as rig,
    ):
        for page in pages:
            part = {"type": "image_url", "image_url": {"url": url + page}}
            assert (await post(rig, chat_body([part]))).status_code == 413


async def test_what_a_body_becomes_counts(serve, peaks):
    """A million empty lists in three megabytes are sixty as objects."""
    async with serve(max_inflight_bytes=50 * KIB * KIB) as rig:
        lists = b'{"prompt": [' + b"[]," * 10**6 + b"[]]}"
        assert (await post(rig, lists, "/v1/completions")).status_code == 413
        assert max(peaks) == len(lists)


async def test_a_long_recording_is_counted_with_the_windows_that_are_cut_from_it(serve, whisper_model, peaks):
    data = speech(70)
    async with serve(whisper_model.folder) as rig:
        answer = await rig.http.post("/v1/audio/transcriptions", files={"file": ("x.wav", data)})
        assert answer.status_code == 200
        assert max(peaks) >= 3 * len(data)  # the file, what the helpers read, its windows


async def test_of_an_upload_no_more_is_counted_than_there_is(serve, whisper_model):
    """While the form is read and while the helpers look at a recording, there are two copies of it."""
    clip, long = speech(29), speech(70)
    async with serve(whisper_model.folder, max_inflight_bytes=5 * len(clip) // 2) as rig:
        answer = await rig.http.post("/v1/audio/transcriptions", files={"file": ("x.wav", clip)})
        assert answer.status_code == 200
    async with serve(whisper_model.folder, max_inflight_bytes=5 * len(long) // 2) as rig:
        answer = await rig.http.post("/v1/audio/transcriptions", files={"file": ("x.wav", long)})
        assert answer.status_code == 413  # its windows would be a third copy


async def test_a_budget_is_a_share_of_the_memory_if_none_is_given(rig):
    assert rig.service.admission.budget.limit_bytes > 64 * KIB * KIB
    body = chat_body([audio_part(speech(1))])
    assert (await post(rig, body)).status_code == 400  # signpost hears nothing
