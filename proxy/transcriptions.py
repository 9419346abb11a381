"""POST /v1/audio/transcriptions: an uploaded recording as text."""

from __future__ import annotations

import math
import zlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from common.errors import TriptychError
from common.sampling_params import SamplingParams
from proxy.errors import from_validation
from proxy.exchange import Exchange, Json, Payload, Plain, Sse
from proxy.generation import Delta
from proxy.generation_fields import Seed
from proxy.service import Service
from proxy.speech import Segment, Speech

_MAX_FIELDS: Final = 32


class TranscriptionForm(BaseModel):
    """The fields beside the file. Those that we do not support are refused by name."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    response_format: Literal["json", "text", "verbose_json"] = "json"
    temperature: float = Field(0.0, ge=0, le=2)
    timestamp_granularities: list[Literal["segment"]] = []
    stream: bool = False
    seed: Seed | None = None
    max_completion_tokens: int | None = Field(None, ge=1)


async def transcriptions(service: Service, exchange: Exchange) -> AsyncGenerator[Payload]:
    """The text of a recording as JSON, plain text, JSON with segments, or a stream."""
    form, data = await _read_form(exchange)
    service.check_model(form.model)
    _check_model_hears(service)
    if form.stream and form.response_format == "verbose_json":
        raise TriptychError("invalid_request", "verbose_json cannot be streamed: use json or text", "response_format")
    item = await service.intake.of_bytes("audio", data, "file")
    sampling = SamplingParams(max_tokens=service.max_model_len, temperature=form.temperature, seed=form.seed)
    speech = Speech(service, exchange, item, sampling, form.max_completion_tokens)
    async with aclosing(speech.deltas(form.language or None, form.prompt)) as deltas:
        if form.stream:
            async for event in _stream(speech, deltas):
                yield event
        else:
            async for _ in deltas:
                pass
            yield _answer(form, speech)


def _check_model_hears(service: Service) -> None:
    if service.transcribes:
        return
    if service.info.media_kind == "audio":
        message = f"{service.model_name} is no speech model: send clips with /v1/chat/completions"
        raise TriptychError("invalid_request", message, "model")
    raise TriptychError("invalid_request", f"{service.model_name} does not take audio", "file")


async def _read_form(exchange: Exchange) -> tuple[TranscriptionForm, bytes]:
    """The form and the bytes of its file, all in memory: a proxy may have no writable disk."""
    content_type = exchange.request.headers.get("content-type", "")
    if not content_type.startswith("multipart/form-data"):
        message = f"the body must be multipart/form-data, not {content_type or 'without a content type'}"
        raise TriptychError("invalid_request", message)
    parser = MultiPartParser(exchange.request.headers, exchange.stream(), max_files=1, max_fields=_MAX_FIELDS)
    parser.spool_max_size = exchange.max_body_bytes
    try:
        raw = await parser.parse()
    except (MultiPartException, KeyError) as error:
        raise TriptychError("invalid_request", f"the form cannot be read: {error}") from error
    try:
        file = raw.get("file")
        if not isinstance(file, UploadFile):
            raise TriptychError("invalid_request", "the form has no file", "file")
        return _validate(raw), await file.read()
    finally:
        await raw.close()


def _validate(raw: FormData) -> TranscriptionForm:
    values: dict[str, Any] = {}
    for key, value in raw.multi_items():
        if key.endswith("[]"):
            values.setdefault(key[:-2], []).append(value)
        elif key != "file":
            values[key] = value
    try:
        return TranscriptionForm.model_validate(values)
    except ValidationError as error:
        raise from_validation(error) from error


def _answer(form: TranscriptionForm, speech: Speech) -> Json | Plain:
    text = _full_text(speech)
    if form.response_format == "text":
        return Plain(text + "\n")
    if form.response_format == "json":
        return Json({"text": text, "usage": _token_usage(speech)})
    segments = [_segment(index, segment, form.temperature) for index, segment in enumerate(speech.segments)]
    return Json(
        {
            "task": "transcribe",
            "language": speech.language,
            "duration": speech.duration_s,
            "text": text,
            "segments": segments,
            "usage": {"type": "duration", "seconds": math.ceil(speech.duration_s)},
        }
    )


def _segment(index: int, segment: Segment, temperature: float) -> dict[str, Any]:
    encoded = segment.text.encode()
    return {
        "id": index,
        "seek": round(segment.start_s * 100),
        "start": round(segment.start_s, 3),
        "end": round(segment.end_s, 3),
        "text": segment.text,
        "tokens": segment.token_ids,
        "temperature": temperature,
        "compression_ratio": len(encoded) / len(zlib.compress(encoded)),
    }


async def _stream(speech: Speech, deltas: AsyncGenerator[Delta]) -> AsyncGenerator[Payload]:
    async for delta in deltas:
        if delta.text:
            yield Sse({"type": "transcript.text.delta", "delta": delta.text})
    yield Sse({"type": "transcript.text.done", "text": _full_text(speech), "usage": _token_usage(speech)})
    yield Sse(None)


def _full_text(speech: Speech) -> str:
    return "".join(segment.text for segment in speech.segments).strip()


def _token_usage(speech: Speech) -> dict[str, Any]:
    usage = speech.usage
    return {
        "type": "tokens",
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
