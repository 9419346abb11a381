"""POST /v1/chat/completions: a conversation with text, pictures or speech in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from common.errors import TriptychError
from common.messages import MediaKind, TokenLogprob
from proxy.api.choices import Choice, best
from proxy.api.logprobs import LogprobShapes
from proxy.api.messages import AudioPart, AudioUrlPart, ImagePart, Message, TextPart
from proxy.api.openai_types import ChatRequest, parse
from proxy.api.speech import Speech, SpeechOptions
from proxy.dispatch.jobs import Job, MediaItem, make_slots
from proxy.dispatch.prompt_logprobs import check_prompt_logprobs
from proxy.dispatch.text_stream import Delta, TextStream, Usage
from proxy.media.intake import MediaSource
from proxy.server.queue_delay import RequestTickets
from proxy.server.request_context import Json, Payload, RequestContext, Sse
from proxy.service import Service


async def chat_completions(service: Service, exchange: RequestContext) -> AsyncGenerator[Payload]:
    """The answer to one chat request, whole or as a stream."""
    service.check_lines()
    body = await parse(ChatRequest, exchange)
    service.check_model(body.model)
    if service.info.media_kind == "text":
        message = f"{service.model_name} is an encoder-decoder model of text and holds no conversations"
        raise TriptychError("invalid_request", f"{message}: use /v1/completions", "model")
    sources = collect_media(body.messages, service.info.media_kind, service.model_name)
    places = service.join_line(exchange, "media" if sources else "text")
    media = await service.intake.load(sources, exchange.held)
    if service.transcribes:
        answer = _transcribe(service, exchange, places, body, media)
    else:
        answer = await _generate(service, exchange, places, body, media)
    async with aclosing(answer.deltas):
        if body.stream:
            async for event in _stream(answer, body):
                yield event
        else:
            yield await _collect(answer, body)


@dataclass(frozen=True)
class _Answer:
    """An answer under way. `generation` is None where it comes from several jobs, as a transcription's may."""

    head: dict[str, Any]
    shapes: LogprobShapes
    deltas: AsyncGenerator[Delta]
    usage: Usage
    generation: TextStream | None = None

    def logprobs(self, body: ChatRequest, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return None if body.num_logprobs is None else self.shapes.chat(entries)


def collect_media(messages: list[Message], kind: MediaKind | None, model: str) -> list[MediaSource]:
    """The media of a conversation in order of appearance.

    Raises TriptychError("invalid_request") for media that the model does not take.
    """
    sources = []
    for i, message in enumerate(messages):
        for j, part in enumerate(message.content if isinstance(message.content, list) else []):
            where = f"messages[{i}].content[{j}]"
            if isinstance(part, ImagePart):
                sources.append(MediaSource("image", f"{where}.image_url.url", url=part.image_url.url))
            elif isinstance(part, AudioPart):
                sources.append(MediaSource("audio", f"{where}.input_audio.data", data=part.input_audio.data))
            elif isinstance(part, AudioUrlPart):
                sources.append(MediaSource("audio", f"{where}.audio_url.url", url=part.audio_url.url))
    for source in sources:
        if source.kind != kind:
            takes = f"{kind} input only" if kind else "text only"
            message_text = f"{source.param}: {model} takes {takes}, not {source.kind} input"
            raise TriptychError("invalid_request", message_text, source.param)
    return sources


def template_messages(messages: list[Message], with_media: bool) -> list[dict[str, Any]]:
    """Messages as chat templates know them: parts for a model that takes media, plain text for any other."""
    rendered = []
    for message in messages:
        role = "system" if message.role == "developer" else message.role
        content: str | list[dict[str, str]]
        if not isinstance(message.content, list):
            content = message.content or ""
        elif with_media:
            content = [_template_part(part) for part in message.content]
        else:
            content = "\n".join(part.text for part in message.content if isinstance(part, TextPart))
        rendered.append({"role": role, "content": content})
    return rendered


def _template_part(part: TextPart | ImagePart | AudioPart | AudioUrlPart) -> dict[str, str]:
    """One part as templates look for it: by its type, or by a key that is called like the kind of media."""
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    if isinstance(part, ImagePart):
        return {"type": "image"}
    return {"type": "audio", "audio": ""}


async def _generate(
    service: Service, exchange: RequestContext, places: RequestTickets, body: ChatRequest, media: list[MediaItem]
) -> _Answer:
    if body.language is not None:
        message = f"language is for speech models, {service.model_name} is none"
        raise TriptychError("invalid_request", message, "language")
    messages = template_messages(body.messages, service.info.media_kind is not None)
    prompt = await asyncio.to_thread(service.text.render_chat, messages)
    slots = make_slots(media, service.text.placeholder_indices(prompt, len(media)))
    limit = service.token_limit(len(prompt), body.token_limit, "messages")
    sampling = body.sampling(service.text, limit)
    check_prompt_logprobs(sampling.prompt_logprobs, len(prompt))
    job = Job(exchange.id, prompt, sampling, slots, media, body.priority or 0, body.fields)
    generation = service.generation(job, exchange, places.take(), body)
    deltas = service.deltas(generation, exchange)
    return _Answer(_head(service, exchange, body), service.shapes(body), deltas, generation.usage, generation)


def _transcribe(
    service: Service, exchange: RequestContext, places: RequestTickets, body: ChatRequest, media: list[MediaItem]
) -> _Answer:
    """A speech model in a conversation: it writes down the one clip; text beside it is the hint of what came before."""
    if len(media) != 1:
        message = f"{service.model_name} transcribes one clip (input_audio or audio_url) per request, not {len(media)}"
        raise TriptychError("invalid_request", message, "messages")
    for name, used in (("n", body.num_choices > 1 or body.picks_best), ("prompt_logprobs", body.prompt_logprobs)):
        if used:
            message = f"{name} is not available for a speech model: a clip has one transcript"
            raise TriptychError("invalid_request", message, name)
    sampling = body.sampling(service.text, service.max_model_len, default_temperature=0.0)
    texts = [message["content"] for message in template_messages(body.messages, with_media=False)]
    options = SpeechOptions(
        language=body.language,
        prompt="\n".join(filter(None, texts)) or None,
        token_limit=body.token_limit,
        priority=body.priority or 0,
    )
    speech = Speech(service, exchange, places, media[0], sampling, options)
    return _Answer(_head(service, exchange, body), service.shapes(body), speech.deltas(), speech.usage)


async def _collect(answer: _Answer, body: ChatRequest) -> Json:
    choices = [Choice() for _ in range(body.width if body.picks_best else body.num_choices)]
    async for delta in answer.deltas:
        choices[delta.index].add(delta)
    value = {**answer.head, "choices": _choices(answer, body, best(choices, body.num_choices))}
    if body.prompt_logprobs is not None and answer.generation is not None:
        value["prompt_logprobs"] = answer.shapes.prompt(answer.generation.prompt_logprobs)
    return Json({**value, "usage": answer.usage.to_json()})


def _choices(answer: _Answer, body: ChatRequest, choices: Sequence[Choice]) -> list[dict[str, Any]]:
    return [
        {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": answer.logprobs(body, choice.logprobs),
            "finish_reason": choice.finish_reason,
            **body.told(choice.token_ids),
            **({"score": choice.score} if body.use_beam_search else {}),
        }
        for index, choice in enumerate(choices)
    ]


async def _stream(answer: _Answer, body: ChatRequest) -> AsyncGenerator[Payload]:
    begun: set[int] = set()
    async for delta in answer.deltas:
        role: dict[str, str] = {} if delta.index in begun else {"role": "assistant"}
        rest = {"logprobs": answer.logprobs(body, delta.logprobs), **body.told(delta.token_ids)}
        if role or delta.text:
            begun.add(delta.index)
            yield _chunk(answer, body, delta.index, {**role, "content": delta.text}, None, rest)
            rest = {"logprobs": None, **body.told(())}
        if delta.finish_reason is not None:
            yield _chunk(answer, body, delta.index, {}, delta.finish_reason, rest)
    if body.wants_usage_event:
        yield Sse({**answer.head, "choices": [], "usage": answer.usage.to_json()})
    yield Sse(None)


def _chunk(
    answer: _Answer, body: ChatRequest, index: int, delta: dict[str, str], finish: str | None, rest: dict[str, Any]
) -> Sse:
    choice = {"index": index, "delta": delta, "finish_reason": finish, **rest}
    return Sse({**answer.head, "choices": [choice], **body.chunk_usage(answer.usage)})


def _head(service: Service, exchange: RequestContext, body: ChatRequest) -> dict[str, Any]:
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    return {"id": exchange.id, "object": kind, "created": int(exchange.created_s), "model": service.model_name}
