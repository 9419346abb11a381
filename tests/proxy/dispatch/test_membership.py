"""Workers come, leave, come back as something else: who gets work, and what waits for whom."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
import zmq.asyncio

from broker.cluster.rpc import WorkerClient
from common.errors import ErrorInfo
from common.messages import Encode, Generate
from proxy.dispatch.jobs import MediaItem
from proxy.dispatch.placement import pick_encoder
from proxy.dispatch.worker_pool import WorkerPool
from tests.proxy.conftest import ProxyHarness, eventually
from tests.proxy.fake_decoders import FakeDecoder
from tests.proxy.fake_workers import SILENT
from tests.proxy.sample_media import image_part, picture
from tests.proxy.streams import gather

PICTURE = [image_part(picture())]


async def _progressed(rig, count: int) -> None:
    runner = next(iter(rig.service.dispatcher.runners.values()))
    await eventually(lambda: len(runner._progress._sequences[0].token_ids) == count)


async def test_a_stream_whose_only_decoder_died_goes_on_when_it_is_back(rig):
    rig.cluster.decoders[0].pause_after = 2
    stream = await rig.chat(stream=True)
    await _progressed(rig, 2)
    await rig.cluster.decoders[0].die()
    await rig.wait_for_workers()
    back = await rig.cluster.add_decoder()
    assert (await gather(stream))[0] == {0: "a red sign"}
    assert [len(part.token_ids) for part in back.of(Generate)[0].resumed] == [2]


@asynccontextmanager
async def silent_decoder(rig: ProxyHarness, **changes: Any) -> AsyncIterator[None]:
    """Let the proxy know a decoder for the length of the block whose address accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        decoder = await rig.cluster.add_decoder(requests_address=f"tcp://{host}:{port}", **changes)
        await eventually(lambda: decoder.id in rig.service.pool._workers)
        yield
        await decoder.die()


async def test_a_worker_that_cannot_be_connected_to_gets_nothing_while_there_is_another_one(serve):
    """It is in the registry, and something accepts connections where it should be, but says nothing."""
    async with serve() as rig, silent_decoder(rig):
        for _ in range(4):
            assert (await rig.chat()).choices[0].message.content == "a red sign"
        assert rig.count("retries_total", reason="decoder_gone") == 0


async def test_a_worker_that_got_the_port_of_a_dead_one_is_not_taken_for_it(rig):
    """The registry still has the dead one, at an address where an encoder would refuse its requests."""
    await rig.cluster.decoders[0].die()
    await rig.wait_for_workers()
    later = rig.cluster.encoders[0]
    dead = await rig.cluster.add_decoder(requests_address=later.server.address)
    await rig.wait_for_workers()
    waiting = asyncio.create_task(rig.chat())
    await eventually(lambda: dead.id not in rig.service.pool._workers)
    assert later.of(Generate)
    await rig.cluster.add_decoder()
    assert (await waiting).choices[0].message.content == "a red sign"


async def test_requests_that_wait_are_spread_over_workers_that_are_found_together(serve, monkeypatch):
    """As after a restart of the proxy: of several connections one is the first."""
    monkeypatch.setattr("proxy.dispatch.worker_pool.TOGETHER_S", 1000.0)
    opened, gates = WorkerClient.opened, dict[str, asyncio.Event]()

    async def opened_in_turn(client: WorkerClient) -> bool:
        if client.address in gates:
            await gates[client.address].wait()
        return await opened(client)

    monkeypatch.setattr(WorkerClient, "opened", opened_in_turn)
    async with serve() as rig:
        await rig.cluster.decoders[0].die()
        await rig.wait_for_workers()
        waiting = [asyncio.create_task(rig.chat()) for _ in range(6)]
        await eventually(lambda: len(rig.service.dispatcher.runners) == 6)
        back = [FakeDecoder(rig.cluster, "prefill_decode", name) for name in ("pd1", "pd2")]
        rig.cluster.decoders.extend(back)
        first, second = [gates.setdefault(decoder.server.address, asyncio.Event()) for decoder in back]
        for decoder in back:
            decoder.pause_after = 0
            await decoder.start()
        found = rig.service.pool._workers
        await eventually(lambda: {"pd1", "pd2"} <= found.keys())
        first.set()
        await eventually(lambda: found["pd1"].client.connected)
        second.set()
        await eventually(lambda: sum(len(decoder.of(Generate)) for decoder in back) == 6)
        assert [len(decoder.of(Generate)) for decoder in back] == [3, 3]
        for decoder in back:
            decoder.resume.set()
        await asyncio.gather(*waiting)


async def test_requests_that_wait_get_a_worker_beside_one_that_cannot_be_connected_to(rig):
    await rig.cluster.decoders[0].die()
    await rig.wait_for_workers()
    waiting = asyncio.create_task(rig.chat())
    await eventually(lambda: len(rig.service.dispatcher.runners) == 1)
    async with silent_decoder(rig):
        await rig.cluster.add_decoder()
        assert (await waiting).choices[0].message.content == "a red sign"


@pytest.mark.parametrize("draining", [False, True])
async def test_a_role_that_was_away_for_long_is_back_once_a_new_worker_is_found_that_takes_work(serve, draining):
    async with serve(decoders=0) as rig:
        pool = rig.service.pool
        pool._last_usable_s["prefill_decode"] = time.monotonic() - 3600
        async with silent_decoder(rig, draining=draining):
            assert (pool.absent_s("prefill_decode") < 60) is not draining


async def test_where_no_worker_can_be_connected_to_that_is_said_after_a_while(serve):
    async with serve(decoders=0, handoff_timeout_s=0.5) as rig, silent_decoder(rig):
        response = await rig.http.post("/v1/completions", json={"prompt": "x"})
        assert (response.status_code, "retry-after" in response.headers) == (503, True)


async def test_what_a_worker_says_that_is_no_message_is_counted_and_changes_nothing(rig):
    decoder = rig.cluster.decoders[0]
    decoder.pause_after = 2
    stream = await rig.chat(stream=True)
    await _progressed(rig, 2)
    for junk in ([b"\xc1"], [b"two", b"at once"], [b""]):
        await decoder.server._socket.send_multipart([decoder.proxies[-1], *junk])
    await eventually(lambda: rig.count("invalid_replies_total") == 4)
    decoder.resume.set()
    assert (await gather(stream))[0] == {0: "a red sign"}


async def test_a_request_that_comes_while_the_only_decoder_restarts_waits_for_it(rig):
    await rig.cluster.decoders[0].die()
    await rig.wait_for_workers()
    task = asyncio.create_task(rig.chat(PICTURE))
    await eventually(lambda: len(rig.service.dispatcher.runners) == 1)
    await rig.cluster.add_decoder()
    assert (await task).choices[0].message.content == "a red sign"


async def test_the_wait_for_a_decoder_counts_from_when_the_last_one_was_lost(serve):
    async with serve(handoff_timeout_s=0.3) as rig:
        await rig.cluster.decoders[0].die()
        pool = rig.service.pool
        await eventually(lambda: pool.absent_s("prefill_decode") > 0.3)
        response = await rig.http.post("/v1/completions", json={"prompt": "x"})
        assert (response.status_code, "retry-after" in response.headers) == (503, True)


async def test_a_proxy_that_has_not_looked_for_workers_yet_waits_for_them(rig):
    """As one that was started again under load: its clients are there before it has seen the registry."""
    known = rig.service.pool
    pool = WorkerPool(known._registry, known.own, rig.service.dispatcher, lambda: None, zmq.asyncio.Context())
    assert pool.absent_s("prefill_decode") < rig.service.settings.handoff_timeout_s
    pool._apply({})
    assert pool.absent_s("prefill_decode") == math.inf
    pool._context.term()


async def test_pictures_wait_for_the_only_encoder_to_come_back(rig):
    rig.cluster.encoders[0].script = lambda message: SILENT
    task = asyncio.create_task(rig.chat(PICTURE))
    await eventually(lambda: bool(rig.cluster.encoders[0].of(Encode)))
    await rig.cluster.encoders[0].die()
    await eventually(lambda: rig.count("retries_total", reason="encoder_gone") == 1)
    back = await rig.cluster.add_encoder()
    assert (await task).choices[0].message.content == "a red sign"
    assert [message.attempt for message in back.of(Encode)] == [1]


async def test_pictures_whose_encoder_is_lost_for_good_are_refused_with_retry_after(serve):
    async with serve(handoff_timeout_s=0.3) as rig:
        await rig.cluster.encoders[0].die()
        await rig.wait_for_workers()
        with pytest.raises(openai.InternalServerError, match="no encoder") as caught:
            await rig.chat(PICTURE)
        assert caught.value.status_code == 503
        assert int(caught.value.response.headers["retry-after"]) >= 1
        await eventually(lambda: not rig.cluster.decoders[0]._running)


@pytest.mark.parametrize(("name", "fallbacks"), [("pd", 1), ("epd", 0)])
async def test_without_an_encoder_a_decoder_that_can_encodes_itself(serve, name, fallbacks):
    async with serve(encoders=0, decoders=0) as rig:
        decoder = await rig.cluster.add_decoder(name, encodes=True)
        await rig.wait_for_workers()
        assert (await rig.http.get("/ready")).status_code == 200
        assert (await rig.chat(PICTURE)).choices[0].message.content == "a red sign"
        assert [message.destination for message in decoder.of(Encode)] == [decoder.id]
        assert rig.count("encoder_fallbacks_total") == fallbacks


async def test_without_an_encoder_pictures_go_to_those_that_encode_however_busy(serve):
    async with serve(encoders=0, decoders=1) as rig:
        able = await rig.cluster.add_decoder("epd", encodes=True, outstanding_tokens=1000)
        await rig.wait_for_workers()
        assert (await rig.chat(PICTURE)).choices[0].message.content == "a red sign"
        assert len(able.of(Generate)) == len(able.of(Encode)) == 1
        await rig.chat()
        assert len(rig.cluster.decoders[0].of(Generate)) == 1


async def test_a_job_whose_last_encoder_dies_moves_to_a_worker_that_encodes(serve):
    async with serve(decoders=1) as rig:
        able = await rig.cluster.add_decoder("epd", encodes=True, outstanding_tokens=1000)
        await rig.wait_for_workers()
        (encoder,) = rig.cluster.encoders
        encoder.script = lambda message: SILENT
        task = asyncio.create_task(rig.chat(PICTURE))
        await eventually(lambda: bool(encoder.of(Encode)))
        await encoder.die()
        assert (await task).choices[0].message.content == "a red sign"
        assert len(able.of(Generate)) == len(able.of(Encode)) == 1
        assert rig.count("retries_total", reason="no_encoder") == 1
        await eventually(lambda: rig.aborted() == {"pd0"})


async def test_a_job_that_waits_for_an_encoder_moves_to_a_worker_that_joins_and_encodes(rig):
    (encoder,) = rig.cluster.encoders
    encoder.script = lambda message: SILENT
    task = asyncio.create_task(rig.chat(PICTURE))
    await eventually(lambda: bool(encoder.of(Encode)))
    await encoder.die()
    await eventually(lambda: rig.count("retries_total", reason="encoder_gone") == 1)
    assert not task.done()
    able = await rig.cluster.add_decoder("epd", encodes=True)
    assert (await task).choices[0].message.content == "a red sign"
    assert len(able.of(Encode)) == 1


async def test_a_prompt_with_a_picture_is_repeated_where_the_picture_can_be_encoded(serve):
    async with serve(decoders=0, pairs=(2, 1)) as rig:
        able = await rig.cluster.add_prefill(encodes=True, outstanding_tokens=1000)
        await rig.wait_for_workers()
        for prefill in rig.cluster.prefills[:2]:
            prefill.script = lambda message: SILENT
        task = asyncio.create_task(rig.chat(PICTURE))
        await eventually(lambda: any(one._inputs for one in rig.cluster.prefills))
        victim, other = sorted(rig.cluster.prefills[:2], key=lambda one: not one._inputs)
        await rig.cluster.encoders[0].die()
        await rig.wait_for_workers()
        await victim.die()
        assert (await task).choices[0].message.content == "a red sign"
        assert len(able.of(Encode)) == 1
        assert not other.of(Generate)


async def test_a_prefill_worker_that_can_encodes_itself(serve):
    async with serve(encoders=0, decoders=0, pairs=(0, 1)) as rig:
        prefill = await rig.cluster.add_prefill(encodes=True)
        await rig.wait_for_workers()
        assert (await rig.chat(PICTURE)).choices[0].message.content == "a red sign"
        assert len(prefill.of(Encode)) == rig.count("encoder_fallbacks_total") == 1


async def test_a_decoder_encodes_itself_only_when_every_encoder_has_failed(serve):
    async with serve(decoders=0) as rig:
        decoder = await rig.cluster.add_decoder("pd", encodes=True)
        await rig.wait_for_workers()
        assert (await rig.chat(PICTURE)).choices[0].message.content == "a red sign"
        assert not decoder.of(Encode)
        rig.cluster.encoders[0].script = lambda message: ErrorInfo("internal_error", "boom")
        assert (await rig.chat(PICTURE)).choices[0].message.content == "a red sign"
        assert len(decoder.of(Encode)) == rig.count("encoder_fallbacks_total") == 1


async def test_a_new_worker_gets_work_within_two_seconds(rig):
    rig.cluster.decoders[0].pause_after = 1
    first = await rig.chat(stream=True)
    new = await rig.cluster.add_decoder()
    began = time.monotonic()
    await rig.wait_for_workers()
    second = await rig.chat(stream=True)
    assert new.of(Generate)
    assert time.monotonic() - began < 2.0
    rig.cluster.decoders[0].resume.set()
    assert [await gather(stream) for stream in (first, second)] == [({0: "a red sign"}, {0: "stop"})] * 2


async def test_a_draining_worker_finishes_what_it_has_and_gets_nothing_new(serve):
    async with serve(encoders=2, decoders=2) as rig:
        leaving, staying = rig.cluster.decoders
        encoder = rig.cluster.encoders[0]
        leaving.pause_after = 1
        stream = await rig.chat(stream=True)
        assert leaving.of(Generate)
        for worker in (leaving, encoder):
            await worker.registry.heartbeat(draining=True)
        pool = rig.service.pool
        await eventually(lambda: len(pool.workers("prefill_decode")) == len(pool.workers("encoder")) == 1)
        for number in range(6):
            await rig.chat([image_part(picture(f"#{number:06x}"))])
        assert (len(leaving.of(Generate)), len(staying.of(Generate)), len(encoder.of(Encode))) == (1, 6, 0)
        leaving.resume.set()
        assert (await gather(stream))[0] == {0: "a red sign"}


async def test_an_instance_comes_back_in_another_role(serve):
    async with serve(encoders=2) as rig:
        old = rig.cluster.encoders[1]
        await old.die(leave_entry=True)
        new = FakeDecoder(rig.cluster, "prefill_decode", old.id)
        rig.cluster.decoders.append(new)
        await new.start()
        pool = rig.service.pool
        await eventually(lambda: (len(pool.workers("encoder")), len(pool.workers("prefill_decode"))) == (1, 2))
        rig.cluster.decoders[0].pause_after = 1
        stream = await rig.chat(stream=True)
        answers = await asyncio.gather(*(rig.chat(PICTURE) for _ in range(3)))
        assert all(answer.choices[0].message.content == "a red sign" for answer in answers)
        assert new.of(Generate)
        assert not new.of(Encode)
        rig.cluster.decoders[0].resume.set()
        await gather(stream)


async def test_pictures_of_one_request_are_spread_over_encoders(serve):
    async with serve(encoders=3) as rig:
        await rig.chat([image_part(picture(f"#{number:06x}")) for number in range(3)])
        assert [len(encoder.of(Encode)) for encoder in rig.cluster.encoders] == [1, 1, 1]


async def test_equal_pictures_of_one_request_meet_though_their_encoder_has_got_others_since(serve):
    async with serve(encoders=2) as rig:
        by_home: dict[str, list[bytes]] = {}
        for number in range(20):
            data, encoders = picture(f"#{number:06x}"), rig.service.pool.workers("encoder")
            home, _ = pick_encoder(MediaItem.of("image", data, "").content_hash, encoders)
            by_home.setdefault(home.instance_id, []).append(data)
        (first, twice, *_), (other, *_) = by_home["e0"], by_home["e1"]
        await rig.chat([image_part(data) for data in (first, twice, other, twice)])
        assert [len(encoder.of(Encode)) for encoder in rig.cluster.encoders] == [1, 3]


async def test_a_conversation_stays_where_its_prompt_is_cached(serve):
    async with serve(decoders=3) as rig:
        opening = "Tell me about the sign. " * 40
        for decoder in rig.cluster.decoders:
            decoder.pause_after = 1
        streams = [await rig.chat(f"{number} {opening}", stream=True) for number in range(3)]
        for decoder in rig.cluster.decoders:
            decoder.resume.set()
        for stream in streams:
            await gather(stream)
        homes = [_heard(rig, f"{number} Tell") for number in range(3)]
        assert sorted(homes) == [["pd0"], ["pd1"], ["pd2"]]
        for number in range(3):
            await rig.chat(f"{number} {opening} And what does it say?")
        assert [_heard(rig, f"{number} Tell") for number in range(3)] == [home * 2 for home in homes]
        assert rig.count("affinity_total", outcome="hit") == 3
        assert 'triptych_proxy_load_imbalance{role="prefill_decode"} 1.0' in (await rig.http.get("/metrics")).text


def _heard(rig, words: str) -> list[str]:
    """The decoders that got prompts with these words, as often as they did."""
    decode = rig.cluster.text.decode
    return [
        decoder.id
        for decoder in rig.cluster.decoders
        for message in decoder.of(Generate)
        if words in decode(message.prompt_token_ids)
    ]


async def test_a_worker_that_comes_and_one_that_drains_are_seen_without_looking(serve, monkeypatch):
    monkeypatch.setattr("proxy.dispatch.worker_pool.POLL_S", 1000.0)
    async with serve(encoders=0, decoders=0) as rig:
        first = await rig.cluster.add_decoder()
        await rig.wait_for_workers()
        assert (await rig.chat()).choices[0].message.content == "a red sign"
        await first.registry.heartbeat(draining=True)
        await eventually(lambda: rig.service.pool.workers("prefill_decode") == [])
