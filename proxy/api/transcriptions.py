"""POST /v1/audio/transcriptions and /v1/audio/translations: uploaded recordings as text."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Final, Literal

from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from common.errors import invalid
from common.sampling_params import MAX_LENGTH_PENALTY, MAX_SEQUENCES, SamplingParams
from common.text import whisper_prompt
from common.text.whisper_prompt import Task, language_name
from common.text.whisper_rules import TEMPERATURES, Rules
from proxy.api.logprobs import LogprobShapes
from proxy.api.prompts import processed_prompts
from proxy.api.sampling_fields import Int32, Seed, plain_drawing, refuse_sampling
from proxy.api.segments import Segment, as_srt, as_vtt
from proxy.api.speech import Speech, SpeechOptions
from proxy.media.voice import VoiceOptions
from proxy.server.errors import from_validation
from proxy.server.request_context import Payload, RequestContext, Sse
from proxy.service import Service

_MAX_FIELDS: Final = 32
_CHARSETS: Final = ("utf-8", "utf8", "us-ascii", "ascii", "iso-8859-1", "latin-1", "latin1")
"""Accepted charsets of forms. Python has codecs that raise, take minutes, or return no text."""


Temperature = Annotated[float, Field(ge=0, le=2)]


class ChunkingStrategy(BaseModel):
    """OpenAI's: parts of a recording without speech are left out. `auto` has the defaults."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["auto", "server_vad"]
    threshold: float = Field(0.5, ge=0, le=1)
    prefix_padding_ms: int = Field(300, ge=0, le=10_000)
    silence_duration_ms: int = Field(2000, ge=0, le=60_000)

    @property
    def voice(self) -> VoiceOptions:
        return VoiceOptions(self.threshold, self.prefix_padding_ms / 1000, self.silence_duration_ms / 1000)

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, value: Any) -> Any:
        """Take `auto`, or the object as JSON: fields of forms are texts. Null counts as not given."""
        if isinstance(value, str) and not value.lstrip().startswith("{"):
            return {"type": value}
        try:
            given = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError) as error:
            raise ValueError(f"is not JSON: {error}") from error
        return {name: one for name, one in given.items() if one is not None} if isinstance(given, dict) else given


class TranscriptionForm(BaseModel):
    """Fields beside the file. Unsupported fields are refused by name.

    Beyond OpenAI's: how tokens are drawn (`top_p`, `top_k`, `min_p`, `seed`) and repetition is kept down, as in a chat,
    `max_completion_tokens` (for each window of 30 s), `return_token_ids`, `return_prompts` (the first window's),
    `priority`, and beam search, whose width is `best_of`. `decoder_prompt` is Whisper's for the first window; later
    windows share its language and task. Thresholds and `vad_filter` are faster-whisper's; of several temperatures, each
    is for text that failed before.
    """

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    decoder_prompt: str | None = None
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    temperature: list[Temperature] = Field([0.0], min_length=1, max_length=8)
    no_speech_threshold: float = Field(0.6, ge=0, le=1)
    log_prob_threshold: float = Field(-1.0, ge=-100, le=0)
    compression_ratio_threshold: float = Field(2.4, ge=0, le=1e6)
    vad_filter: bool = False
    chunking_strategy: ChunkingStrategy | None = None
    timestamp_granularities: list[Literal["segment", "word"]] = []
    include: list[Literal["logprobs"]] = []
    stream: bool = False
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: Seed | None = None
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    max_completion_tokens: int | None = Field(None, ge=1)
    use_beam_search: bool = False
    best_of: int = Field(5, ge=1, le=MAX_SEQUENCES)
    length_penalty: float = Field(1.0, ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)
    return_token_ids: bool = False
    return_prompts: bool = False
    priority: Int32 = 0

    @field_validator("response_format", mode="before")
    @classmethod
    def _without_speakers(cls, value: Any) -> Any:
        if value == "diarized_json":
            raise ValueError("no model here tells speakers apart: use verbose_json, whose segments have times")
        return value

    @field_validator("temperature", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return value if isinstance(value, list) else [value]

    @property
    def rules(self) -> Rules | None:
        """Whisper's rules. Beam search has no probabilities; one temperature but 0 is wanted as it is."""
        if self.use_beam_search:
            return None
        temperatures = tuple(self.temperature)
        return Rules(
            self.no_speech_threshold,
            self.log_prob_threshold,
            self.compression_ratio_threshold,
            TEMPERATURES if temperatures == (0.0,) else temperatures,
        )

    @property
    def voice(self) -> VoiceOptions | None:
        if self.chunking_strategy is not None:
            return self.chunking_strategy.voice
        return VoiceOptions() if self.vad_filter else None

    @property
    def has_segments(self) -> bool:
        return self.response_format in ("verbose_json", "srt", "vtt")

    @property
    def has_words(self) -> bool:
        return "word" in self.timestamp_granularities

    def check(self) -> None:
        """Raise TriptychError("invalid_request") naming the field for combinations without meaning."""
        if self.stream and self.has_segments:
            raise invalid(f"{self.response_format} cannot be streamed: use json or text", "response_format")
        if self.timestamp_granularities and not self.has_segments:
            message = f"{self.response_format} has no timestamp_granularities: use verbose_json, srt or vtt"
            raise invalid(message, "timestamp_granularities")
        if self.include and (self.stream or self.response_format != "json"):
            raise invalid("logprobs come with response_format json only, and are not streamed", "include")
        if self.use_beam_search:
            refuse_sampling(self)

    def sampling(self, service: Service) -> SamplingParams:
        """Return the sampling of a window: fields not given are the model's defaults, but for the temperature."""
        given = self.model_dump(include={"top_p", "top_k", "min_p", "repetition_penalty"}, exclude_none=True)
        return SamplingParams(
            **plain_drawing({**service.sampling_defaults, **given, "temperature": self.temperature[0]}),
            max_tokens=service.max_model_len,
            seed=self.seed,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            beam_width=self.best_of if self.use_beam_search else 1,
            length_penalty=self.length_penalty,
            logprobs=0 if self.include else None,
        ).validate()


async def transcriptions(
    service: Service, context: RequestContext, task: Task = "transcribe"
) -> AsyncGenerator[Payload]:
    """Answer with the text of a recording: JSON, plain text, JSON with segments, subtitles, or a stream."""
    service.check_lines("media")
    form, data = await _read_form(context)
    service.check_model(form.model)
    if not service.transcribes:
        if service.info.media_kind == "audio":
            raise invalid(f"{service.model_name} is no speech model: send clips with /v1/chat/completions", "model")
        raise invalid(f"{service.model_name} does not take audio", "file")
    form.check()
    tickets = service.join_line(context, "media")
    item = await service.intake.of_bytes("audio", data, "file")
    told = whisper_prompt.options(
        service.info,
        service.text,
        decoder_prompt=form.decoder_prompt or None,
        language=form.language or None,
        prompt=form.prompt,
        task=task,
        timestamps=form.has_segments,
    )
    if told["task"] != task:
        raise invalid(f"decoder_prompt has the task {told['task']}, which is for the other route", "decoder_prompt")
    if form.has_segments and not told["timestamps"]:
        message = f"decoder_prompt has <|notimestamps|>: {form.response_format} needs timestamps, so leave that out"
        raise invalid(message, "decoder_prompt")
    options = SpeechOptions(
        **told,
        details=form.response_format == "verbose_json",
        token_limit=form.max_completion_tokens,
        priority=form.priority,
        rules=form.rules,
        live=form.stream,
        voice=form.voice,
        words=form.has_words,
    )
    speech = Speech(service, context, tickets, item, form.sampling(service), options)
    async with aclosing(speech.deltas()) as deltas:
        async for delta in deltas:
            if form.stream and delta.text:
                yield Sse({"type": "transcript.text.delta", "delta": delta.text})
    if form.stream:
        yield Sse({"type": "transcript.text.done", "text": speech.text, "usage": _usage(speech)})
        yield Sse(None)
    else:
        yield _answer(service, form, speech, task)


async def _read_form(context: RequestContext) -> tuple[TranscriptionForm, bytes]:
    """Return the form and the bytes of the file, in memory: a proxy may have no writable disk."""
    text = context.request.headers.get("content-type", "")
    media_type, options = parse_options_header(text)
    if media_type != b"multipart/form-data":
        raise invalid(f"the body must be multipart/form-data, not {text or 'without a content type'}")
    charset = options.get(b"charset", b"utf-8").decode("latin-1")
    if charset.lower() not in _CHARSETS:
        raise invalid(f"the form must be UTF-8, not of the charset {charset!r}")
    parser = MultiPartParser(context.request.headers, context.stream(), max_files=1, max_fields=_MAX_FIELDS)
    parser.spool_max_size = context.max_body_bytes
    try:
        raw = await parser.parse()
    except MultiPartException as error:
        raise invalid(f"the form cannot be read: {error}") from error
    try:
        file = raw.get("file")
        if not isinstance(file, UploadFile):
            raise invalid("the form has no file: send it as the field `file` (curl: -F file=@PATH)", "file")
        context.held.reserve(file.size or 0)
        form, data = _validate(raw), await file.read()
    finally:
        await raw.close()
    context.held.release(len(data))  # the parser's copy; the body's reservation stays for file and fields
    return form, data


def _validate(raw: FormData) -> TranscriptionForm:
    values: dict[str, Any] = {}
    lists: dict[str, list[Any]] = {}
    objects: dict[str, dict[str, Any]] = {}
    for key, value in raw.multi_items():
        name, bracket, part = key.partition("[")
        if key.endswith("[]"):
            lists.setdefault(key[:-2], []).append(value)
        elif bracket:
            objects.setdefault(name, {})[part.removesuffix("]")] = value
        elif key != "file":
            values[key] = value
    for name in sorted(values.keys() & (lists.keys() | objects.keys())):
        raise invalid(f"{name} is given with and without brackets", name)
    try:
        return TranscriptionForm.model_validate(values | lists | objects)
    except ValidationError as error:
        raise from_validation(error, TranscriptionForm.model_fields) from error


def _answer(service: Service, form: TranscriptionForm, speech: Speech, task: Task) -> Response:
    cues = segments = speech.segments()
    if form.has_words:  # word by word
        cues = [Segment(word.start_s, word.end_s, word.text, (), word.start_s) for word in speech.words]
    match form.response_format:
        case "text":
            return PlainTextResponse(speech.text + "\n")
        case "srt":
            return PlainTextResponse(as_srt(cues))
        case "vtt":
            return PlainTextResponse(as_vtt(cues))
    extra = processed_prompts(service.text, speech.job) if form.return_prompts and speech.usage.prompt_tokens else {}
    extra |= {"token_ids": speech.token_ids} if form.return_token_ids else {}
    if form.response_format == "json":
        if form.include:
            content = LogprobShapes(service.token_texts, 0).chat(speech.logprobs)["content"]
            extra["logprobs"] = [{name: entry[name] for name in ("token", "logprob", "bytes")} for entry in content]
        return JSONResponse({"text": speech.text, "usage": _usage(speech), **extra})
    if form.has_words:
        extra["words"] = [word.to_json() for word in speech.words]
    if not form.has_words or "segment" in form.timestamp_granularities:
        extra["segments"] = [one.to_json(index) for index, one in enumerate(segments)]
    return JSONResponse(
        {
            "task": task,
            "language": None if speech.language is None else language_name(speech.language),
            "duration": speech.duration_s,
            "text": speech.text,
            "usage": _usage(speech),
            **extra,
        }
    )


def _usage(speech: Speech) -> dict[str, Any]:
    """Return the usage as whisper-1 and vLLM count it: seconds of audio."""
    return {"type": "duration", "seconds": math.ceil(speech.duration_s)}
