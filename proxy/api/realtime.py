"""WS /v1/realtime: OpenAI's realtime sessions, as far as they transcribe.

append ... append | speech_started ... append | speech_stopped, committed
                    guess  guess  guess       | the whole segment
                           delta  delta       | delta, completed
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
import uuid
from collections import deque
from collections.abc import Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, cast
from urllib.parse import urlsplit

import numpy as np
import soundfile
from fastapi import Request, WebSocket
from pydantic import AliasChoices, AliasPath, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json
from starlette.websockets import WebSocketDisconnect

from common.errors import ErrorInfo, TriptychError, invalid
from common.telemetry import get_logger
from common.text import whisper_prompt
from common.text.whisper_rules import Rules
from proxy.api.live_audio import BYTES_PER_S, RATE, STEP_BYTES, Agreement, LiveAudio
from proxy.api.speech import Speech, SpeechOptions
from proxy.api.transcriptions import ChunkingStrategy, TranscriptionForm
from proxy.dispatch.jobs import part_id
from proxy.server.errors import error_body, error_response, from_validation, shown
from proxy.server.limits import Reservation
from proxy.server.request_context import RequestContext
from proxy.service import Service

MAX_BUFFER_S: Final = 120
IDLE_S: Final = 300.0
"""Time without an event of the client after which a session is closed."""
GUESS_BYTES: Final = BYTES_PER_S // 2
"""New audio after which an open segment is transcribed again."""
_TICK_S: Final = 0.25
_REASONS: Final = {1001: "no event for too long", 1008: "see the error", 1011: "an unexpected error", 1012: "drained"}
_EVENTS: Final = "session.update, transcription_session.update, input_audio_buffer.append, .commit and .clear"

log = get_logger()


class _Transcription(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    language: str | None = None
    prompt: str | None = None


class _TurnDetection(ChunkingStrategy):
    silence_duration_ms: int = Field(500, ge=100, le=60_000)
    create_response: Any = Field(None, exclude=True)
    interrupt_response: Any = Field(None, exclude=True)
    idle_timeout_ms: Any = Field(None, exclude=True)


class _Format(BaseModel):
    type: Literal["audio/pcm"]
    rate: Literal[24000] = RATE


_InputName = Literal["format", "noise_reduction", "transcription", "turn_detection"]


def _of_input(name: str, default: Any) -> Any:
    return Field(default, validation_alias=AliasChoices(AliasPath("audio", "input", name), f"input_audio_{name}", name))


class SessionSettings(BaseModel):
    """Wishes of a client, by OpenAI's names or those of its beta."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["transcription"] = "transcription"
    format: _Format | Literal["pcm16"] = _of_input("format", "pcm16")
    noise_reduction: Any = _of_input("noise_reduction", None)
    transcription: _Transcription | None = _of_input("transcription", _Transcription())
    turn_detection: _TurnDetection | None = _of_input("turn_detection", _TurnDetection(type="server_vad"))
    include: list[str] | None = Field(None, max_length=0)
    modalities: Any = None
    audio: dict[Literal["input"], dict[_InputName, Any]] | None = None
    """For its names alone, each of which must be known: the values are those of the fields above."""

    def to_json(self, session_id: str, *, beta: bool) -> dict[str, Any]:
        wished = self.model_dump(include={"transcription", "turn_detection"})
        session = {"id": session_id, "object": "realtime.transcription_session"}
        if beta:
            wished["input_audio_transcription"] = wished.pop("transcription")
            return {**session, "input_audio_format": "pcm16", **wished}
        wished["format"] = {"type": "audio/pcm", "rate": RATE}
        return {**session, "type": "transcription", "audio": {"input": wished}}


@dataclass(eq=False)
class _Segment:
    """Audio between two commits. `arrived_s` is when the audio of its last transcription had come."""

    previous_id: str | None
    transcribed: int
    """Bytes of the session up to the end of its last transcription."""
    id: str = field(default_factory=lambda: f"item_{uuid.uuid4().hex}")
    agreement: Agreement = field(default_factory=Agreement)
    context: RequestContext | None = None
    audio: bytes = b""
    arrived_s: float = 0.0
    num_parts: int = 0


async def realtime(service: Service, websocket: WebSocket) -> None:
    """Serve a session until either side closes it."""
    origin, allowed = websocket.headers.get("origin"), service.settings.allowed_origins
    own = urlsplit(origin or "").netloc == websocket.headers.get("host")
    if origin is not None and not own and not {origin, "*"} & set(allowed):
        info = ErrorInfo("invalid_request", f"pages of {shown(origin)} may not open sessions (--allowed-origins)")
        await websocket.send_denial_response(error_response(info, 403))
        return
    offered: list[str] = websocket.scope.get("subprotocols", [])
    await websocket.accept("realtime" if "realtime" in offered else None)
    beta = "realtime=v1" in websocket.headers.get("openai-beta", "") or "openai-beta.realtime-v1" in offered
    session = Session(service, websocket, beta=beta)
    with service.metrics.realtime_sessions.track_inprogress(), suppress(WebSocketDisconnect):
        try:
            code = await session.run(websocket.query_params)
        except TriptychError as error:
            await session.send_error(error.info)
            code = 1008
        if code is not None:
            await websocket.close(code, _REASONS[code])


class Session:
    """An accepted websocket and its audio. One transcription runs at a time: of what is committed, else of the rest."""

    def __init__(self, service: Service, websocket: WebSocket, *, beta: bool) -> None:
        self._service, self._websocket, self._beta = service, websocket, beta
        self._id = f"sess_{uuid.uuid4().hex}"
        self._settings = SessionSettings()
        self._listener = LiveAudio(_TurnDetection(type="server_vad").voice)
        self._open: _Segment | None = None
        self._committed: deque[_Segment] = deque()
        self._last_id: str | None = None  # committed
        self._arrived_s = 0.0
        self._held = Reservation(service.admission.budget)
        self._changed = asyncio.Event()
        self._guess: asyncio.Task[None] | None = None

    async def run(self, query: Mapping[str, str]) -> int | None:
        """Return the code to close by, None where the client has left. A draining proxy ends the open segment first.

        Raises TriptychError for a session that cannot be served here.
        """
        if (intent := query.get("intent", "transcription")) != "transcription":
            raise invalid(f"sessions only transcribe here: intent is transcription, not {shown(intent)}", "intent")
        self._service.check_model(query.get("model"))
        if not self._service.transcribes:
            raise invalid(f"{self._service.model_name} is no speech model: it cannot transcribe live audio", "model")
        tasks = [asyncio.create_task(work) for work in (self._read(), self._transcribe())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        except WebSocketDisconnect:
            return None
        except Exception as error:
            log.error("unexpected error in a realtime session", exc_info=error)
            return 1011
        finally:
            tasks += [self._guess] if self._guess else []
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for segment in (self._open, *self._committed):
                self._end(segment)
            self._held.release()

    async def send_error(self, info: ErrorInfo, event_id: Any = None) -> None:
        await self._send("error", error={**error_body(info)["error"], "event_id": event_id})

    async def _send(self, kind: str, **fields: Any) -> None:
        event = {"type": kind, "event_id": f"event_{uuid.uuid4().hex}", **fields}
        await self._websocket.send_text(json.dumps(event, ensure_ascii=False))

    async def _send_settings(self, what: str) -> None:
        kind = "transcription_session" if self._beta else "session"
        await self._send(f"{kind}.{what}", session=self._settings.to_json(self._id, beta=self._beta))

    async def _read(self) -> int | None:
        """Answer events; whatever is wrong with one, the session goes on. Returns as `run` does."""
        await self._send_settings("created")
        receiving, last_s = asyncio.create_task(self._websocket.receive()), time.monotonic()
        try:
            while True:
                await asyncio.wait({receiving}, timeout=_TICK_S)
                if receiving.done():
                    message, last_s = receiving.result(), time.monotonic()
                    if message["type"] == "websocket.disconnect":
                        return None
                    receiving = asyncio.create_task(self._websocket.receive())
                    await self._answer(message.get("text") or message.get("bytes") or "")
                if self._open is None and not self._committed:
                    if self._service.admission.draining:
                        return 1012
                    if time.monotonic() - last_s > IDLE_S:
                        return 1001
        finally:
            receiving.cancel()

    async def _answer(self, text: str | bytes) -> None:
        event: Any = None
        try:
            try:
                event = from_json(text, allow_inf_nan=False)  # refuses half an emoji, too
            except ValueError as error:
                raise invalid(f"the event is not JSON: {error}") from error
            match event:
                case {"type": "session.update" | "transcription_session.update" as kind, "session": dict(wished)}:
                    await self._update(wished, beta=kind != "session.update")
                case {"type": "input_audio_buffer.append", "audio": str(audio)}:
                    await self._append(audio)
                case {"type": "input_audio_buffer.commit"}:
                    if len(self._listener.audio) < STEP_BYTES:
                        raise invalid("there is less than 0.1 s of audio to commit: append some first")
                    await self._commit()
                case {"type": "input_audio_buffer.clear"}:
                    self._take_audio()
                    self._end(self._open)
                    self._open = None
                    self._account()
                    await self._send("input_audio_buffer.cleared")
                case _:
                    raise invalid(f"{shown(event)} is no event of a transcription session: those are {_EVENTS}", "type")
        except TriptychError as error:
            await self.send_error(error.info, event.get("event_id") if isinstance(event, dict) else None)

    async def _update(self, wished: dict[str, Any], *, beta: bool) -> None:
        try:
            given = SessionSettings.model_validate(wished)
        except ValidationError as error:
            raise from_validation(error) from error
        settings = self._settings.model_copy(update={name: getattr(given, name) for name in given.model_fields_set})
        heard = settings.transcription or _Transcription()
        self._service.check_model(heard.model)
        whisper_prompt.build(self._service.info, self._service.text, language=heard.language, prompt=heard.prompt)
        self._settings, self._beta = settings, beta
        self._listener.voice = None if settings.turn_detection is None else settings.turn_detection.voice
        self._listener.speaks = self._open is not None
        await self._send_settings("updated")

    async def _append(self, audio: str) -> None:
        try:
            pcm = base64.b64decode(audio, validate=True)
        except ValueError as error:
            raise invalid(f"audio is not base64: {error}", "audio") from error
        if len(pcm) % 2:
            raise invalid(f"audio has {len(pcm)} bytes, which are no samples of 16 bits", "audio")
        if len(self._listener.audio) + len(pcm) > MAX_BUFFER_S * BYTES_PER_S:
            message = f"the buffer would hold more than {MAX_BUFFER_S} s: commit or clear it"
            raise TriptychError("item_too_large", message, "audio")
        if self._service.admission.draining and self._open is None:
            return
        self._held.reserve(len(pcm))
        self._arrived_s = time.monotonic()
        for begin in range(0, len(pcm), STEP_BYTES):
            turn = self._listener.hear(pcm[begin : begin + STEP_BYTES])
            if turn == "started" or (self._listener.voice is None and self._open is None):
                self._open = _Segment(self._last_id, self._listener.start)
            about = {"item_id": None if self._open is None else self._open.id}
            if turn == "started":
                at_ms = self._listener.start * 1000 // BYTES_PER_S
                await self._send("input_audio_buffer.speech_started", audio_start_ms=at_ms, **about)
            elif turn == "stopped":
                at_ms = self._listener.end * 1000 // BYTES_PER_S
                await self._send("input_audio_buffer.speech_stopped", audio_end_ms=at_ms, **about)
                await self._commit()
            await asyncio.sleep(0)  # a minute of audio takes a third of a second
        self._account()
        self._changed.set()

    def _take_audio(self) -> bytes:
        if self._guess is not None:
            self._guess.cancel()
        return self._listener.take()

    async def _commit(self) -> None:
        segment, self._open = self._open or _Segment(self._last_id, self._listener.start), None
        self._last_id = segment.id
        segment.audio, segment.arrived_s = self._take_audio(), self._arrived_s
        self._committed.append(segment)
        self._changed.set()
        before: dict[str, Any] = {"previous_item_id": segment.previous_id}
        await self._send("input_audio_buffer.committed", item_id=segment.id, **before)
        item = {"id": segment.id, "object": "realtime.item", "type": "message", "role": "user", "status": "completed"}
        item["content"] = [{"type": "input_audio", "transcript": None}]  # type: ignore[assignment]
        await self._send(f"conversation.item.{'created' if self._beta else 'added'}", item=item, **before)

    async def _transcribe(self) -> None:
        while True:
            segment = self._open
            if self._committed:
                await self._complete(self._committed[0])
                self._end(self._committed.popleft())
                self._account()
            elif segment is not None and self._listener.end - segment.transcribed >= GUESS_BYTES:
                self._guess = asyncio.create_task(self._tell_agreed(segment))
                await asyncio.wait({self._guess})
                if not self._guess.cancelled():
                    self._guess.result()
            else:
                self._changed.clear()
                await self._changed.wait()

    async def _tell_agreed(self, segment: _Segment) -> None:
        """Transcribe an open segment. No failure is told: the next transcription comes soon."""
        segment.transcribed = self._listener.end
        if self._service.lines["media"].excess_s > 0:  # left out under load, which refuses no request
            return
        arrived_s, segment.arrived_s = segment.arrived_s, self._arrived_s
        try:
            speech = await self._speech(segment, bytes(self._listener.audio), Rules(temperatures=(0.0,)))
        except TriptychError as error:
            log.debug("an open segment was not transcribed", code=error.info.code, error=error.info.message)
        else:
            await self._tell(segment, "delta", arrived_s, delta=segment.agreement.push(speech.text))

    async def _complete(self, segment: _Segment) -> None:
        arrived_s, outcome = segment.arrived_s, "ok"
        try:
            speech = await self._speech(segment, segment.audio, Rules())
        except TriptychError as error:
            outcome = error.info.code
            await self._tell(segment, "failed", arrived_s, **error_body(error.info))
        else:
            usage = {"type": "duration", "seconds": speech.duration_s}
            await self._tell(segment, "delta", arrived_s, delta=segment.agreement.rest(speech.text))
            await self._tell(segment, "completed", arrived_s, transcript=speech.text, usage=usage)
        if segment.context is not None:
            segment.context.outcome = outcome

    async def _tell(self, segment: _Segment, what: str, arrived_s: float, **fields: Any) -> None:
        if fields.get("delta") != "":
            kind = f"conversation.item.input_audio_transcription.{what}"
            await self._send(kind, item_id=segment.id, content_index=0, **fields)
            self._service.metrics.realtime_delay.labels(what).observe(time.monotonic() - arrived_s)

    async def _speech(self, segment: _Segment, pcm: bytes, rules: Rules) -> Speech:
        """Return a finished transcription: a part of the segment's request, which begins with the first one."""
        service, wished, now_s = self._service, self._settings.transcription or _Transcription(), time.monotonic()
        if segment.context is None:
            segment.context = service.admission.admit(cast(Request, self._websocket), "rt-", 0)
        whole, held = segment.context, Reservation(service.admission.budget)
        part = part_id(whole.id, segment.num_parts)
        context = replace(whole, id=part, arrival_s=now_s, deadline_s=now_s + service.admission.timeout_s, held=held)
        segment.num_parts += 1
        out = io.BytesIO()
        soundfile.write(out, np.frombuffer(pcm, "<i2"), RATE, format="WAV", subtype="PCM_16")
        tickets = service.join_line(context, "media")
        try:
            item = await service.intake.of_bytes("audio", out.getvalue(), "audio")
            told = whisper_prompt.options(service.info, service.text, language=wished.language, prompt=wished.prompt)
            options = SpeechOptions(**told, rules=rules)
            sampling = TranscriptionForm().sampling(service)
            speech = Speech(service, context, tickets, item, sampling, options)
            async with aclosing(speech.deltas()) as deltas:
                async for _ in deltas:
                    pass
            return speech
        finally:
            tickets.release()
            held.release()
            whole.first_token_s, whole.prompt_tokens = context.first_token_s, context.prompt_tokens
            whole.completion_tokens = context.completion_tokens

    def _end(self, segment: _Segment | None) -> None:
        if segment is not None and segment.context is not None:
            self._service.admission.release(segment.context)
            segment.context = None

    def _account(self) -> None:
        """Hold memory for the audio that is there: less than before, but for an event that is still being heard."""
        held = len(self._listener.audio) + sum(len(segment.audio) for segment in self._committed)
        self._held.release(self._held.num_bytes - held)
