"""What clients see, and what is left behind, when something goes wrong."""

from __future__ import annotations

import asyncio
import time

import openai
import pytest

from common.errors import ErrorInfo
from common.messages import Abort, Encode, Encoded, Failed, Generate, Tokens
from proxy.dispatch import job_runner
from tests.proxy.conftest import eventually
from tests.proxy.fake_decoders import FakeDecoder
from tests.proxy.fake_workers import SILENT, FakeEncoder
from tests.proxy.sample_media import image_part, picture


async def _first(stream):
    async for chunk in stream:
        return chunk
    raise AssertionError("an empty stream")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_token_aborts_everywhere(rig, stream):
    rig.cluster.encoders[0].script = lambda message: SILENT
    task = asyncio.create_task(rig.chat([image_part(picture())], stream=stream))
    await eventually(lambda: bool(rig.cluster.encoders[0].of(Encode)))
    task.cancel()
    await eventually(lambda: rig.aborted() == {"e0", "pd0"})
    await eventually(lambda: rig.service.admission.inflight == 0)
    assert rig.count("aborts_total") == 1


async def test_a_client_that_leaves_a_stream_aborts_everywhere(rig):
    rig.cluster.decoders[0].pause_after = 1
    stream = await rig.chat([image_part(picture())], stream=True)
    await _first(stream)
    await stream.close()
    await eventually(lambda: "pd0" in rig.aborted())
    await eventually(lambda: rig.service.admission.inflight == 0 and not rig.cluster.decoders[0]._running)


@pytest.mark.parametrize("workers", [{"decoders": 1}, {"decoders": 0, "pairs": (1, 1)}], ids=["whole", "apart"])
async def test_a_request_that_is_lost_on_its_way_is_asked_for_and_sent_again(serve, monkeypatch, workers):
    monkeypatch.setattr(job_runner, "INQUIRY_S", 0.05)
    async with serve(**workers) as rig:
        readers = [*rig.cluster.decoders, *rig.cluster.prefills]
        for reader in readers:
            reader.lose = 1
        assert (await rig.chat([image_part(picture())])).choices[0].message.content == "a red sign"
        assert rig.count("retries_total", reason="decoder_error") == 1
        assert all(len(reader.of(Generate)) > 1 for reader in readers)


async def test_an_encoder_that_had_lost_the_proxy_and_dropped_an_item_gets_it_again(rig):
    (encoder,) = rig.cluster.encoders
    encoder.script = lambda message: SILENT if message.attempt == 0 else None
    task = asyncio.create_task(rig.chat([image_part(picture())]))
    await eventually(lambda: bool(encoder.of(Encode)))
    dropped = Failed(encoder.of(Encode)[0].request_id, ErrorInfo("unavailable", "it had lost its connection"))
    await encoder.reply(encoder.proxies[0], dropped)
    assert (await task).choices[0].message.content == "a red sign"
    assert [message.attempt for message in encoder.of(Encode)] == [0, 1]
    assert rig.count("retries_total", reason="encoder_error") == 1


async def test_more_than_max_inflight_is_refused_before_the_body_is_looked_at(serve):
    async with serve(max_inflight=1) as rig:
        rig.cluster.decoders[0].pause_after = 1
        stream = await rig.chat(stream=True)
        await _first(stream)
        refused = await rig.http.post("/v1/chat/completions", content=b"not even JSON")
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "overloaded"
        rig.cluster.decoders[0].resume.set()
        async for _ in stream:
            pass
        await eventually(lambda: rig.service.admission.inflight == 0)
        assert (await rig.chat()).choices[0].message.content == "a red sign"


async def test_a_refusal_by_a_full_worker_is_429_and_counted(rig):
    rig.cluster.decoders[0].failure = ErrorInfo("overloaded", "4097 requests are waiting or running: try again later")
    answer = await rig.http.post("/v1/completions", json={"prompt": "x"})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert rig.count("refused_total", reason="worker") == 1


async def test_a_refusal_by_a_full_encoder_is_429_and_counted_once(rig):
    rig.cluster.encoders[0].script = lambda message: ErrorInfo("overloaded", "256 items are under way on this encoder")
    with pytest.raises(openai.RateLimitError, match="could not be encoded in 3 attempts"):
        await rig.chat([image_part(picture())])
    assert rig.count("refused_total", reason="worker") == 1


async def test_a_corrupt_picture_is_the_clients_fault_and_named(rig):
    rig.cluster.encoders[0].script = lambda message: ErrorInfo("bad_media", "the picture is truncated")
    with pytest.raises(openai.BadRequestError) as caught:
        await rig.chat([{"type": "text", "text": "x"}, image_part(picture())])
    assert caught.value.param == "messages[0].content[1].image_url.url"
    assert "truncated" in str(caught.value)
    await eventually(lambda: "pd0" in rig.aborted())
    assert len(rig.cluster.encoders[0].of(Encode)) == 1


async def test_a_failing_encoder_is_replaced_by_another(serve):
    async with serve(encoders=2) as rig:
        for encoder in rig.cluster.encoders:
            encoder.script = lambda message: ErrorInfo("internal_error", "boom") if message.attempt == 0 else None
        assert (await rig.chat([image_part(picture())])).choices[0].message.content == "a red sign"
        assert [len(encoder.of(Encode)) for encoder in rig.cluster.encoders] == [1, 1]


async def test_three_failed_attempts_are_the_last_word(rig):
    rig.cluster.encoders[0].script = lambda message: ErrorInfo("internal_error", f"boom {message.attempt}")
    with pytest.raises(openai.InternalServerError) as caught:
        await rig.chat([image_part(picture())])
    assert "3 attempts" in str(caught.value)
    assert "boom 2" in str(caught.value)
    assert [message.attempt for message in rig.cluster.encoders[0].of(Encode)] == [0, 1, 2]
    await eventually(lambda: not rig.cluster.decoders[0]._running)


async def test_a_busy_cluster_is_waited_for_longer_than_a_failing_one(rig):
    encoder = rig.cluster.encoders[0]
    encoder.script = lambda message: ErrorInfo("timeout", "no room yet") if message.attempt < 8 else None
    assert (await rig.chat([image_part(picture())])).choices[0].message.content == "a red sign"
    encoder.script = lambda message: ErrorInfo("timeout", "no room yet")
    with pytest.raises(openai.APIStatusError, match="10 attempts") as caught:
        await rig.chat([image_part(picture())])
    assert caught.value.status_code == 504
    await eventually(lambda: not rig.cluster.decoders[0]._running)


async def test_what_one_encoder_cannot_deliver_another_one_does(serve):
    async with serve(encoders=2) as rig:
        for encoder in rig.cluster.encoders:
            encoder.script = lambda message: SILENT
        task = asyncio.create_task(rig.chat([image_part(picture())]))
        await eventually(lambda: any(encoder.of(Encode) for encoder in rig.cluster.encoders))
        cut_off, other = sorted(rig.cluster.encoders, key=lambda encoder: not encoder.of(Encode))
        other.script = lambda message: None
        (encode,) = cut_off.of(Encode)
        late = ErrorInfo("timeout", "it was not in place by its deadline")
        reply = Encoded(encode.request_id, encode.input_id, encode.attempt, late, undelivered=True)
        await cut_off.reply(cut_off.proxies[0], reply)
        assert (await task).choices[0].message.content == "a red sign"
        assert (len(cut_off.of(Encode)), len(other.of(Encode))) == (1, 1)
        assert rig.count("retries_total", reason="undelivered") == 1


async def test_an_encoder_whose_attempts_end_early_again_and_again_is_left_for_another(serve):
    async with serve(encoders=2) as rig:
        early = ErrorInfo("timeout", "no grant within 0.0 s")
        healthy = []

        def script(encoder):
            return lambda message: None if encoder in healthy else early

        for encoder in rig.cluster.encoders:
            encoder.script = lambda message: SILENT
        task = asyncio.create_task(rig.chat([image_part(picture())]))
        await eventually(lambda: any(encoder.of(Encode) for encoder in rig.cluster.encoders))
        ahead, other = sorted(rig.cluster.encoders, key=lambda encoder: not encoder.of(Encode))
        healthy.append(other)
        for encoder in rig.cluster.encoders:
            encoder.script = script(encoder)
        (encode,) = ahead.of(Encode)
        await ahead.reply(ahead.proxies[0], Encoded(encode.request_id, encode.input_id, encode.attempt, early))
        assert (await task).choices[0].message.content == "a red sign"
        assert (len(ahead.of(Encode)), len(other.of(Encode))) == (2, 1)


async def test_a_burst_that_an_encoder_is_at_for_more_than_ten_steps_of_a_handoff_is_answered(serve, monkeypatch):
    """One item after the other, each soon enough; those that are not in place by their deadline are so told."""
    turn = asyncio.Lock()
    items: dict[tuple[str, int], asyncio.Task[None]] = {}

    async def encode():
        async with turn:
            await asyncio.sleep(0.1)

    async def handle(encoder, proxy, message):
        if not isinstance(message, Encode):
            return
        key = message.request_id, message.input_id, message.attempt
        # An item outlives its attempt, as in an encoder: cut off with the attempt, late ones would never be done.
        if key[:2] not in items:
            items[key[:2]] = asyncio.create_task(encode())
        try:
            async with asyncio.timeout(message.deadline_s - time.monotonic()):
                await asyncio.shield(items[key[:2]])
        except TimeoutError:
            late = ErrorInfo("timeout", "it was not in place by its deadline")
            encoder.server.send(proxy, Encoded(*key, error=late))
            return
        encoder.cluster.reader(message.destination).put_input(message.request_id, message.input_id)
        encoder.server.send(proxy, Encoded(*key))

    monkeypatch.setattr(FakeEncoder, "handle", handle)
    async with serve(handoff_timeout_s=0.25) as rig:
        began_s = time.monotonic()
        burst = [rig.chat([image_part(picture(f"#{number:06x}"))]) for number in range(40)]
        answers = await asyncio.gather(*burst)
        assert {answer.choices[0].message.content for answer in answers} == {"a red sign"}
        assert time.monotonic() - began_s > 10 * rig.service.settings.handoff_timeout_s


async def test_a_dying_encoders_items_go_to_another(serve):
    async with serve(encoders=2) as rig:
        for encoder in rig.cluster.encoders:
            encoder.script = lambda message: SILENT
        task = asyncio.create_task(rig.chat([image_part(picture())]))
        encoders = rig.cluster.encoders
        await eventually(lambda: any(encoder.of(Encode) for encoder in encoders))
        victim, other = encoders if encoders[0].of(Encode) else encoders[::-1]
        other.script = lambda message: None
        await victim.die()
        assert (await task).choices[0].message.content == "a red sign"
        assert [message.attempt for message in other.of(Encode)] == [1]


async def test_an_encoder_that_was_given_up_stops_once_the_request_is_answered(serve):
    async with serve(encoders=2, handoff_timeout_s=0.3) as rig:
        for encoder in rig.cluster.encoders:
            encoder.script = lambda message: SILENT if message.attempt == 0 else None
        assert (await rig.chat([image_part(picture())])).choices[0].message.content == "a red sign"
        [silent] = [e for e in rig.cluster.encoders if [message.attempt for message in e.of(Encode)] == [0]]
        await eventually(lambda: rig.aborted() == {silent.id})


async def test_a_killed_encoder_is_noticed_long_before_its_registry_entry_expires(serve, redis):
    async with serve(encoders=2) as rig:
        encoders = rig.cluster.encoders
        for encoder in encoders:
            encoder.script = lambda message: SILENT
        task = asyncio.create_task(rig.chat([image_part(picture())]))
        await eventually(lambda: any(encoder.of(Encode) for encoder in encoders))
        victim, other = encoders if encoders[0].of(Encode) else encoders[::-1]
        other.script = lambda message: None
        await victim.die(leave_entry=True)
        await asyncio.wait_for(task, 2.0)
        assert victim.id in await rig.cluster.encoders[0].registry.instances()
        assert [worker.instance_id for worker in rig.service.pool.workers("encoder")] == [other.id]
        await victim.registry.unregister()


async def test_many_requests_with_every_kind_of_end_leave_nothing_behind(serve):
    async with serve(encoders=2, decoders=2) as rig:
        for encoder in rig.cluster.encoders:
            encoder.script = lambda message: (
                ErrorInfo("bad_media", "bad") if message.media == picture("black") else None
            )
        for decoder in rig.cluster.decoders:
            decoder.answer = lambda message: "a long sentence about a red sign " * 3
        kinds = {
            "plain": lambda: rig.chat(),
            "pictures": lambda: rig.chat([image_part(picture("red")), image_part(picture("blue"))]),
            "corrupt": lambda: rig.chat([image_part(picture("black")), image_part(picture("red"))]),
            "stop": lambda: rig.chat(stop=["sentence"]),
            "length": lambda: rig.chat(max_tokens=3),
            "left": lambda: asyncio.wait_for(rig.chat([image_part(picture())]), 0.02),
            "left stream": lambda: _leave(rig),
        }
        outcomes = await asyncio.gather(*(make() for make in kinds.values() for _ in range(6)), return_exceptions=True)
        failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        assert all(isinstance(error, openai.BadRequestError | TimeoutError) for error in failed), failed
        await eventually(lambda: rig.service.admission.inflight == 0)
        await eventually(lambda: not any(decoder._running for decoder in rig.cluster.decoders))


async def _leave(rig):
    stream = await rig.chat(stream=True)
    await _first(stream)
    await stream.close()


async def test_an_encoder_that_says_nothing_counts_as_failed_after_its_deadline(serve):
    async with serve(encoders=2, handoff_timeout_s=0.2) as rig:
        for encoder in rig.cluster.encoders:
            encoder.script = lambda message: SILENT if message.attempt == 0 else None
        assert (await rig.chat([image_part(picture())])).choices[0].message.content == "a red sign"
        assert sorted(len(encoder.of(Encode)) for encoder in rig.cluster.encoders) == [1, 1]


async def test_an_input_that_the_decoder_asks_for_again_is_sent_again(rig):
    rig.cluster.decoders[0].ask_again = [0, 0, 0, 0]
    assert (await rig.chat([image_part(picture())])).choices[0].message.content == "a red sign"
    assert len(rig.cluster.encoders[0].of(Encode)) >= 2


async def test_without_workers_it_is_503_with_retry_after(serve):
    async with serve(encoders=0, decoders=0) as rig:
        response = await rig.http.post("/v1/completions", json={"prompt": "x"})
        assert response.status_code == 503
        assert "retry-after" in response.headers
        assert response.json()["error"]["code"] == "unavailable"
        assert rig.count("aborts_total") == 0, "no worker had it"
        await eventually(lambda: rig.service.pool.broker_reachable)
        ready = await rig.http.get("/ready")
        assert (ready.status_code, "no decoder" in ready.text) == (503, True)
        await rig.cluster.add_decoder()
        await rig.wait_for_workers()
        assert "no encoder" in (await rig.http.get("/ready")).text
        with pytest.raises(openai.InternalServerError, match="no encoder"):
            await rig.chat([image_part(picture())])
        await rig.cluster.add_encoder()
        await rig.wait_for_workers()
        assert (await rig.http.get("/ready")).status_code == 200


async def test_an_incompatible_worker_is_not_used_and_says_why(serve):
    async with serve(decoders=0) as rig:
        stranger = FakeDecoder(rig.cluster, "prefill_decode", "stranger")
        rig.cluster.decoders.append(stranger)
        await stranger.start(fingerprint="something else")
        await eventually(lambda: "stranger" in rig.service.pool.refused)
        assert "something else" in (await rig.http.get("/ready")).json()["reason"]


async def test_a_live_worker_that_is_given_up_is_told_and_found_again_under_a_new_name(rig):
    encoder, decoder = rig.cluster.encoders[0], rig.cluster.decoders[0]
    encoder.script = lambda message: SILENT
    task = asyncio.create_task(rig.chat([image_part(picture())]))
    await eventually(lambda: bool(encoder.of(Encode)))
    for worker in rig.service.pool.workers("encoder") + rig.service.pool.workers("prefill_decode"):
        rig.service.pool._remove(worker)  # as after a gap in the registry
    encoder.script = lambda message: None
    assert (await task).choices[0].message.content == "a red sign"
    await eventually(lambda: bool(decoder.of(Abort)) and bool(encoder.of(Abort)))
    assert len(set(decoder.proxies)) == len(set(encoder.proxies)) == 2


async def test_a_worker_at_a_job_that_nobody_knows_any_more_is_told_once(rig):
    decoder = rig.cluster.decoders[0]
    decoder.pause_after = 1
    await _leave(rig)
    await eventually(lambda: len(decoder.of(Abort)) == 1)
    (abort,) = decoder.of(Abort)
    for index in (1, 2):
        decoder.server.send(decoder.proxies[-1], Tokens(abort.request_id, index, [5]))
    await eventually(lambda: len(decoder.of(Abort)) == 2)
    await rig.chat(max_tokens=1)
    assert [message.request_id for message in decoder.of(Abort)] == [abort.request_id] * 2


async def test_the_only_decoder_lost_for_good_is_an_error_event_in_a_stream(serve):
    async with serve(handoff_timeout_s=0.5) as rig:
        rig.cluster.decoders[0].pause_after = 1
        stream = await rig.chat(stream=True)
        await _first(stream)
        await rig.cluster.decoders[0].die()
        with pytest.raises(openai.APIError, match="no decoder"):
            async for _ in stream:
                pass


async def test_an_error_before_the_first_token_of_a_stream_has_its_status(rig):
    rig.cluster.decoders[0].failure = ErrorInfo("item_too_large", "the picture is over the cache budget", "x")
    response = await rig.http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], "stream": True}
    )
    assert response.status_code == 413
    assert response.json()["error"] == {
        "message": "the picture is over the cache budget",
        "type": "invalid_request_error",
        "param": "x",
        "code": "item_too_large",
    }
    assert response.headers["x-request-id"].startswith("chatcmpl-")


async def test_a_request_over_its_time_is_ended_everywhere(serve):
    async with serve(request_timeout_s=1.0) as rig:
        rig.cluster.decoders[0].pause_after = 0
        with pytest.raises(openai.APIStatusError) as caught:
            await rig.chat()
        assert caught.value.status_code == 504
        await eventually(lambda: rig.aborted() == {"pd0"})


async def test_a_restarted_broker_does_not_disturb_requests(rig, redis):
    rig.cluster.decoders[0].pause_after = 1
    stream = await rig.chat(stream=True)
    await _first(stream)
    await redis.flushall()
    await eventually(lambda: rig.service.pool.broker_reachable)
    await rig.chat(stream=True, max_tokens=1)
    rig.cluster.decoders[0].resume.set()
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text.endswith("sign")


async def test_stopping_the_proxy_aborts_what_runs(rig):
    rig.cluster.decoders[0].pause_after = 1
    stream = await rig.chat(stream=True)
    await _first(stream)
    decoder = rig.cluster.decoders[0]
    aborted = asyncio.create_task(eventually(lambda: bool(decoder.of(Abort))))
    rig.server.stop()
    await aborted
