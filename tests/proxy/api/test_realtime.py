"""Live audio over a websocket: OpenAI's events both ways, turns, limits, keys, and sessions that end."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from openai.types.beta.realtime import RealtimeServerEvent as BetaServerEvent
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from common.errors import ErrorInfo
from common.messages import Encode, Generate
from proxy.api import realtime as endpoint
from proxy.api.live_audio import LiveAudio
from proxy.server.limits import QueueDelayLimiter
from tests.proxy.conftest import ProxyHarness, eventually

RATE = 24_000
EVENTS: TypeAdapter[Any] = TypeAdapter(RealtimeServerEvent)
BETA_EVENTS: TypeAdapter[Any] = TypeAdapter(BetaServerEvent)
ITEM = "conversation.item.input_audio_transcription"
MANUAL = {"type": "transcription", "audio": {"input": {"turn_detection": None, "transcription": {"language": "en"}}}}


def noise(seconds: float, loudness: float = 0.1) -> bytes:
    samples = np.random.default_rng(0).normal(0, loudness * 2**15, round(seconds * RATE))
    return samples.clip(-(2**15), 2**15 - 1).astype("<i2").tobytes()


def speech(seconds: float) -> bytes:
    """Noise in syllables, as no steady noise is."""
    samples = np.frombuffer(noise(seconds), "<i2").astype(float)
    times = np.arange(len(samples)) / RATE
    return (samples * (0.01 + np.abs(np.sin(2 * np.pi * 2 * times)))).astype("<i2").tobytes()


def silence(seconds: float) -> bytes:
    return noise(seconds, 0.0002)


class Caller:
    """A client of one session. Every event that comes is one of OpenAI's types."""

    def __init__(self, socket: ClientConnection, types: TypeAdapter[Any]) -> None:
        self._socket, self._types = socket, types
        self.seen: list[dict[str, Any]] = []

    async def send(self, kind: str, **fields: Any) -> None:
        await self._socket.send(json.dumps({"type": kind, **fields}))

    async def send_text(self, text: str | bytes) -> None:
        await self._socket.send(text)

    async def append(self, pcm: bytes, piece_s: float = 0.1) -> None:
        size = round(piece_s * RATE) * 2
        for begin in range(0, len(pcm), size):
            audio = base64.b64encode(pcm[begin : begin + size]).decode()
            await self.send("input_audio_buffer.append", audio=audio)

    async def next(self) -> dict[str, Any]:
        async with asyncio.timeout(10):
            event: dict[str, Any] = json.loads(await self._socket.recv())
        if not event["type"].startswith("transcription_session."):  # whose type wants a secret that only REST has
            self._types.validate_python(event)
        self.seen.append(event)
        return event

    async def until(self, kind: str) -> dict[str, Any]:
        while (event := await self.next())["type"] != kind:
            assert event["type"] != "error", event
        return event

    async def error(self) -> dict[str, Any]:
        while (event := await self.next())["type"] != "error":
            pass
        return event["error"]

    async def closed(self) -> int:
        """The code by which the server closes."""
        with contextlib.suppress(ConnectionClosed):
            while True:
                await self.next()
        await self._socket.wait_closed()
        assert self._socket.close_code is not None
        return self._socket.close_code

    def kinds(self) -> list[str]:
        return [event["type"] for event in self.seen]

    def deltas(self) -> str:
        return "".join(event["delta"] for event in self.seen if event["type"] == f"{ITEM}.delta")


@contextlib.asynccontextmanager
async def calling(
    rig: ProxyHarness, query: str = "?intent=transcription", types: TypeAdapter[Any] = EVENTS, **options: Any
) -> AsyncIterator[Caller]:
    url = rig.base_url.replace("http://", "ws://") + f"/v1/realtime{query}"
    async with connect(url, **options) as socket:
        yield Caller(socket, types)


@pytest.fixture
async def caller(speech_rig: ProxyHarness) -> AsyncIterator[Caller]:
    async with calling(speech_rig) as caller:
        yield caller


@pytest.fixture
def no_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only whole segments are transcribed."""
    monkeypatch.setattr(endpoint, "GUESS_BYTES", 10**9)


async def test_a_session_tells_its_settings_and_what_is_committed_is_transcribed(speech_rig, caller, no_guesses):
    created = await caller.until("session.created")
    assert created["session"]["type"] == "transcription"
    heard = created["session"]["audio"]["input"]
    assert heard["format"] == {"type": "audio/pcm", "rate": RATE}
    assert heard["turn_detection"]["type"] == "server_vad"
    await caller.send("session.update", session=MANUAL)
    heard = (await caller.until("session.updated"))["session"]["audio"]["input"]
    assert (heard["turn_detection"], heard["transcription"]["language"]) == (None, "en")
    speech_rig.cluster.decoders[0].answer = lambda message: " well said"
    await caller.append(silence(0.5))
    await caller.send("input_audio_buffer.commit")
    done = await caller.until(f"{ITEM}.completed")
    assert (done["transcript"], done["usage"]) == ("well said", {"type": "duration", "seconds": 0.5})
    assert caller.deltas() == "well said"
    committed, item = caller.seen[2:4]
    assert committed["type"] == "input_audio_buffer.committed"
    assert committed["item_id"] == item["item"]["id"] == done["item_id"]
    assert item["type"] == "conversation.item.added"
    media = speech_rig.cluster.encoders[0].of(Encode)[0].media
    assert media[:4] == b"RIFF"
    assert media.endswith(silence(0.5))
    await caller.append(silence(0.5))
    await caller.send("input_audio_buffer.commit")
    assert (await caller.until("input_audio_buffer.committed"))["previous_item_id"] == done["item_id"]
    await caller.until(f"{ITEM}.completed")


async def test_the_beta_has_its_own_names(speech_rig, no_guesses):
    headers = {"OpenAI-Beta": "realtime=v1"}
    async with calling(speech_rig, types=BETA_EVENTS, additional_headers=headers) as caller:
        await caller.until("transcription_session.created")
        session = {
            "input_audio_format": "pcm16",
            "input_audio_transcription": {"model": speech_rig.model, "language": "de", "prompt": "names"},
            "turn_detection": {"type": "server_vad", "threshold": 0.4, "create_response": True},
            "input_audio_noise_reduction": {"type": "near_field"},
        }
        await caller.send("transcription_session.update", session=session)
        updated = (await caller.until("transcription_session.updated"))["session"]
        assert updated["input_audio_transcription"] == session["input_audio_transcription"]
        assert updated["turn_detection"]["threshold"] == 0.4
        await caller.append(speech(0.5))
        await caller.send("input_audio_buffer.commit")
        await caller.until("conversation.item.created")
        await caller.until(f"{ITEM}.completed")


async def test_the_server_finds_turns(speech_rig, caller, no_guesses):
    await caller.append(silence(1) + speech(2) + silence(1.5) + speech(1) + silence(1), piece_s=0.04)
    for _ in range(2):
        await caller.until(f"{ITEM}.completed")
    begins, ends, texts = (
        [event for event in caller.seen if event["type"].endswith(kind)] for kind in ("started", "stopped", "completed")
    )
    for begin_s, end_s, started, stopped, done in zip((1.0, 4.5), (3.0, 5.5), begins, ends, texts, strict=True):
        assert started["audio_start_ms"] / 1000 == pytest.approx(begin_s - 0.3, abs=0.1)
        assert stopped["audio_end_ms"] / 1000 == pytest.approx(end_s + 0.5, abs=0.25)
        assert started["item_id"] == stopped["item_id"] == done["item_id"]
        assert done["usage"]["seconds"] == pytest.approx(end_s - begin_s + 0.8, abs=0.3)
    await caller.send("input_audio_buffer.clear")
    await caller.until("input_audio_buffer.cleared")
    assert len(speech_rig.cluster.encoders[0].of(Encode)) == 2


async def test_the_client_may_take_over_and_hand_back(speech_rig, caller, no_guesses):
    await caller.append(silence(1))
    await caller.send("session.update", session=MANUAL)
    await caller.append(speech(1))
    await caller.send("session.update", session={"audio": {"input": {"turn_detection": {"type": "server_vad"}}}})
    await caller.append(silence(1) + speech(1) + silence(1))
    first, second = [await caller.until(f"{ITEM}.completed") for _ in range(2)]
    assert first["usage"]["seconds"] > second["usage"]["seconds"] > 1
    assert caller.kinds().count("input_audio_buffer.speech_started") == 1


async def test_what_is_cleared_is_not_told(speech_rig, caller):
    decoder = speech_rig.cluster.decoders[0]
    decoder.pause_after = 0
    await caller.send("session.update", session=MANUAL)
    await caller.append(speech(1))
    await eventually(lambda: len(decoder.of(Generate)) == 1)
    await caller.send("input_audio_buffer.clear")
    await caller.until("input_audio_buffer.cleared")
    await speech_rig.assert_clean()


@pytest.mark.parametrize("settings", [MANUAL, {"type": "transcription"}])
async def test_what_is_cleared_stands_before_no_other_item(speech_rig, caller, no_guesses, settings):
    await caller.send("session.update", session=settings)
    for end in ("commit", "clear", "commit"):
        await caller.append(silence(1) + speech(1))
        await caller.send(f"input_audio_buffer.{end}")
    first, second = [await caller.until("input_audio_buffer.committed") for _ in range(2)]
    assert (first["previous_item_id"], second["previous_item_id"]) == (None, first["item_id"])


async def test_steady_noise_and_silence_are_no_turns(speech_rig, caller):
    await caller.append(silence(3) + noise(0.05) + silence(3))
    await caller.send("input_audio_buffer.clear")
    await caller.until("input_audio_buffer.cleared")
    assert caller.kinds() == ["session.created", "input_audio_buffer.cleared"]


async def test_a_turn_without_a_pause_is_cut_after_half_a_minute(speech_rig, caller, no_guesses):
    await caller.append(silence(1) + speech(45) + silence(1), piece_s=5)
    stopped = await caller.until("input_audio_buffer.speech_stopped")
    assert 25_000 < stopped["audio_end_ms"] <= 31_500
    await caller.until("input_audio_buffer.speech_stopped")
    await caller.until(f"{ITEM}.completed")


async def test_words_come_early_once_two_transcriptions_agree_on_them(speech_rig, caller):
    texts = iter([" he might of", " he might even have", " He might, even have been made", " might not count"])
    whole = " He might even have been made amiable."
    speech_rig.cluster.decoders[0].answer = lambda message: next(texts) if ".3" not in message.request_id else whole
    await caller.send("session.update", session=MANUAL)
    for parts in range(1, 4):
        await caller.append(speech(0.5), piece_s=0.5)
        await eventually(lambda parts=parts: len(speech_rig.cluster.decoders[0].of(Generate)) == parts)
        await eventually(lambda: not speech_rig.service.dispatcher.runners)
    await caller.send("input_audio_buffer.commit")
    done = await caller.until(f"{ITEM}.completed")
    deltas = [event["delta"] for event in caller.seen if event["type"] == f"{ITEM}.delta"]
    assert deltas == ["he might", " even have", " been made amiable."]
    assert done["transcript"] == whole.strip()
    ids = {message.request_id.split(".")[0] for message in speech_rig.cluster.decoders[0].of(Generate)}
    assert len(ids) == 1
    assert speech_rig.count("realtime_delay_seconds_count", event="delta") == 3
    assert speech_rig.count("realtime_delay_seconds_count", event="completed") == 1


async def test_a_commit_does_not_wait_for_a_transcription_of_less(speech_rig, caller):
    decoder = speech_rig.cluster.decoders[0]
    decoder.pause_after = 0
    await caller.send("session.update", session=MANUAL)
    await caller.append(speech(1))
    await eventually(lambda: len(decoder.of(Generate)) == 1)
    assert speech_rig.service.admission.inflight == 1
    decoder.pause_after = None
    await caller.send("input_audio_buffer.commit")
    await caller.until(f"{ITEM}.completed")
    assert speech_rig.aborted()
    await eventually(lambda: speech_rig.service.admission.inflight == 0)


async def test_under_load_early_words_are_left_out_and_a_segment_is_refused_once(speech_rig, caller, monkeypatch):
    looks = []
    monkeypatch.setattr(QueueDelayLimiter, "excess_s", property(lambda line: looks.append(line) or 5.0))
    await caller.send("session.update", session=MANUAL)
    await caller.append(speech(1))
    await eventually(lambda: bool(looks))
    assert speech_rig.count("refused_total", reason="wait") == 0
    await caller.send("input_audio_buffer.commit")
    assert (await caller.until(f"{ITEM}.failed"))["error"]["code"] == "overloaded"
    assert speech_rig.count("refused_total", reason="wait") == 1


BAD_EVENTS = (
    ("{", "not JSON", None),
    ("[1]", "no event of a transcription session", "type"),
    ('{"type": "response.create"}', "no event of a transcription session", "type"),
    ('{"type": "input_audio_buffer.append"}', "no event", "type"),
    ('{"type": "input_audio_buffer.append", "audio": "%%%"}', "not base64", "audio"),
    ('{"type": "input_audio_buffer.append", "audio": "YWJj"}', "no samples of 16 bits", "audio"),
    ('{"type": "input_audio_buffer.commit"}', "less than 0.1 s", None),
)
BAD_SETTINGS = (
    ({"type": "realtime"}, "not 'realtime'", "type"),
    ({"audio": {"input": {"format": {"type": "audio/pcmu"}}}}, "audio/pcm", None),
    ({"audio": {"input": {"turn_detection": {"type": "semantic_vad"}}}}, "server_vad", None),
    ({"audio": {"input": {"transcription": {"model": "other"}}}}, "does not exist here", "model"),
    ({"audio": {"input": {"transcription": {"language": "klingon"}}}}, "unknown language", "language"),
    ({"include": ["item.input_audio_transcription.logprobs"]}, "at most 0", "include"),
    ({"instructions": "be kind"}, "not a known field", "instructions"),
    (
        {"audio": {"input": {"turn_detecion": None, "transcription": {}}}},
        "should be 'format', 'noise_reduction', 'transcription' or 'turn_detection', not 'turn_detecion'",
        "audio.input.turn_detecion",
    ),
    ({"audio": {"input": {"transcription": {}}, "output": {}}}, "should be 'input', not 'output'", "audio.output"),
)
GOOD_SETTINGS = (
    {"audio": {"input": {}}},
    {"audio": {}},
    {"audio": {"input": {"turn_detection": {"type": "server_vad", "threshold": None, "silence_duration_ms": None}}}},
    {"input_audio_format": "pcm16", "turn_detection": {"type": "server_vad", "prefix_padding_ms": None}},
)


async def test_whatever_is_wrong_is_an_error_and_the_session_goes_on(speech_rig, caller, no_guesses):
    await caller.until("session.created")
    for text, says, param in BAD_EVENTS:
        await caller.send_text(text)
        error = await caller.error()
        assert says in error["message"]
        assert (error["type"], error["param"], error["event_id"]) == ("invalid_request_error", param, None)
    for session, says, param in BAD_SETTINGS:
        await caller.send("session.update", session=session, event_id="mine")
        error = await caller.error()
        assert says in error["message"], error
        assert error["event_id"] == "mine"
        assert param is None or error["param"] == param
    for event in (b"\x00\x01", '{"type": "x", "event_id": "\\ud83d"}', '{"type": NaN}', "[" * 10_000):
        await caller.send_text(event)
        assert "not JSON" in (await caller.error())["message"]
    await caller.append(speech(0.5))
    await caller.send("input_audio_buffer.commit")
    await caller.until(f"{ITEM}.completed")


async def test_settings_may_leave_out_all_or_say_null(caller):
    created = await caller.until("session.created")
    for session in GOOD_SETTINGS:
        await caller.send("session.update", session=session)
        updated = await caller.until("session.updated")
        assert updated["session"]["audio"] == created["session"]["audio"]


async def test_much_audio_in_one_event_keeps_no_other_client_waiting(speech_rig, caller, no_guesses, monkeypatch):
    num_passes, seen, hear = 0, list[int](), LiveAudio.hear

    async def count_passes_of_the_loop() -> None:
        nonlocal num_passes
        while True:
            num_passes += 1
            await asyncio.sleep(0)

    def noted(self: LiveAudio, pcm: bytes) -> str | None:
        seen.append(num_passes)
        return hear(self, pcm)

    monkeypatch.setattr(LiveAudio, "hear", noted)
    await caller.send("session.update", session=MANUAL)
    await caller.until("session.updated")
    counting = asyncio.create_task(count_passes_of_the_loop())
    await caller.append(speech(3), piece_s=3)
    await eventually(lambda: len(seen) == 30)
    counting.cancel()
    assert all(before < after for before, after in pairwise(seen))
    assert speech_rig.service.admission.budget.held_bytes == 3 * 2 * RATE


async def test_the_buffer_is_bounded_and_counted(speech_rig, caller, monkeypatch, no_guesses):
    monkeypatch.setattr(endpoint, "MAX_BUFFER_S", 2)
    await caller.send("session.update", session=MANUAL)
    await caller.append(speech(2.5), piece_s=0.5)
    assert (await caller.error())["code"] == "item_too_large"
    assert speech_rig.service.admission.budget.held_bytes == 2 * 2 * RATE
    await caller.send("input_audio_buffer.clear")
    await caller.append(speech(0.5))
    await caller.send("input_audio_buffer.commit")
    assert (await caller.until(f"{ITEM}.completed"))["usage"]["seconds"] == 0.5
    await eventually(lambda: speech_rig.service.admission.budget.held_bytes == 0)


async def test_what_cannot_be_transcribed_has_failed(speech_rig, caller, no_guesses):
    speech_rig.cluster.decoders[0].failure = ErrorInfo("internal_error", "out of luck")
    await caller.append(speech(0.5))
    await caller.send("input_audio_buffer.commit")
    failed = await caller.until(f"{ITEM}.failed")
    assert (failed["error"]["code"], failed["error"]["message"]) == ("internal_error", "out of luck")
    speech_rig.cluster.decoders[0].failure = None
    await caller.append(speech(0.5))
    await caller.send("input_audio_buffer.commit")
    await caller.until(f"{ITEM}.completed")


async def test_a_session_that_transcribes_is_a_request_like_any_other(serve, whisper_model, no_guesses):
    async with serve(whisper_model.folder, max_inflight=1) as rig, calling(rig) as first, calling(rig) as second:
        rig.cluster.decoders[0].pause_after = 0
        await first.append(speech(0.5))
        await first.send("input_audio_buffer.commit")
        await eventually(lambda: rig.service.admission.inflight == 1)
        await second.append(speech(0.5))
        await second.send("input_audio_buffer.commit")
        assert (await second.until(f"{ITEM}.failed"))["error"]["code"] == "overloaded"
        assert rig.count("realtime_sessions") == 2
        rig.cluster.decoders[0].resume.set()
        await first.until(f"{ITEM}.completed")
    await eventually(lambda: rig.count("realtime_sessions") == 0)


async def test_a_client_that_vanishes_leaves_nothing(speech_rig):
    decoder = speech_rig.cluster.decoders[0]
    decoder.pause_after = 0
    async with calling(speech_rig) as caller:
        await caller.send("session.update", session=MANUAL)
        await caller.append(speech(1))
        await eventually(lambda: len(decoder.of(Generate)) == 1)
        caller._socket.transport.abort()
    await eventually(lambda: speech_rig.count("realtime_sessions") == 0)
    await speech_rig.assert_clean()
    assert speech_rig.aborted()


async def test_a_session_without_events_is_closed(speech_rig, monkeypatch):
    monkeypatch.setattr(endpoint, "IDLE_S", 0.1)
    async with calling(speech_rig) as caller:
        assert await caller.closed() == 1001


async def test_a_drain_ends_sessions_after_the_segment_under_way(speech_rig, no_guesses):
    async with calling(speech_rig) as idle, calling(speech_rig) as busy:
        await busy.send("session.update", session=MANUAL)
        await busy.append(speech(0.5))
        await busy.until("session.updated")
        await eventually(lambda: speech_rig.service.admission.budget.held_bytes > 0)
        await speech_rig.http.post("/drain")
        assert await idle.closed() == 1012
        await busy.send("input_audio_buffer.commit")
        await busy.until(f"{ITEM}.completed")
        assert await busy.closed() == 1012


async def test_a_stopping_proxy_closes_sessions(speech_rig):
    async with calling(speech_rig) as caller:
        await caller.until("session.created")
        speech_rig.server.stop()
        assert await caller.closed() == 1012


async def test_keys_come_in_the_header_or_in_the_subprotocol(serve, whisper_model):
    async with serve(whisper_model.folder, api_key="right") as rig:
        for options in (
            {},
            {"additional_headers": {"Authorization": "Bearer wrong"}},
            {"subprotocols": ["realtime", "openai-insecure-api-key.wrong"]},
            {"subprotocols": ["realtime"]},
        ):
            with pytest.raises(InvalidStatus) as refused:
                async with calling(rig, **options):
                    pass
            assert refused.value.response.status_code == 401
            assert b"wrong" not in refused.value.response.body
        async with calling(rig, additional_headers={"Authorization": "Bearer right"}) as caller:
            await caller.until("session.created")
        protocols = ["realtime", "openai-insecure-api-key.right", "openai-beta.realtime-v1"]
        async with calling(rig, subprotocols=protocols) as caller:
            assert caller._socket.subprotocol == "realtime"
            await caller.until("transcription_session.created")


async def test_pages_of_other_origins_are_refused(serve, whisper_model):
    async with serve(whisper_model.folder, allowed_origins=("https://chat.example",)) as rig:
        for origin in ("https://chat.example", rig.base_url):
            async with calling(rig, origin=origin) as caller:
                await caller.until("session.created")
        with pytest.raises(InvalidStatus) as refused:
            async with calling(rig, origin="https://other.example"):
                pass
        assert refused.value.response.status_code == 403
        assert b"--allowed-origins" in refused.value.response.body


async def test_what_cannot_be_served_is_refused_with_a_sentence(serve, whisper_model):
    async with serve(whisper_model.folder) as rig:
        for query, says in (("?model=other", "does not exist here"), ("?intent=conversation", "only transcribe")):
            async with calling(rig, query) as caller:
                assert says in (await caller.error())["message"]
                assert await caller.closed() == 1008
        async with calling(rig, f"?model={rig.model}") as caller:
            await caller.until("session.created")
        plain = await rig.http.get("/v1/realtime")
        assert (plain.status_code, "websocket" in plain.json()["error"]["message"]) == (404, True)
    async with serve() as rig, calling(rig) as caller:
        assert "no speech model" in (await caller.error())["message"]
        assert await caller.closed() == 1008


async def test_a_client_that_reads_nothing_is_not_answered_without_end(speech_rig):
    """Each ping would be answered, and the answers would pile up."""
    url = speech_rig.base_url.replace("http://", "ws://") + "/v1/realtime"
    async with connect(url) as socket:
        socket.transport.pause_reading()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(3):
                for _ in range(2**20):
                    socket.protocol.send_ping(b"x" * 125)
                    socket.transport.write(b"".join(socket.protocol.data_to_send()))
                    if socket.transport.get_write_buffer_size() > 2**20:
                        break
                    await asyncio.sleep(0)
        (connection,) = [
            one for one in speech_rig.server.server_state.connections if hasattr(one, "conn") and one.scope
        ]
        assert connection.transport.get_write_buffer_size() < 2**20
        socket.transport.abort()


async def test_an_upgraded_connection_has_no_deadline_of_http(serve, whisper_model):
    async with serve(whisper_model.folder, client_timeout_s=0.2) as rig, calling(rig) as caller:
        await caller.until("session.created")
        await asyncio.wait({asyncio.ensure_future(caller._socket.wait_closed())}, timeout=0.6)
        await caller.send("input_audio_buffer.clear")
        await caller.until("input_audio_buffer.cleared")
