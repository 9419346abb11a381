"""POST /v1/chat/completions: a conversation with text, pictures or speech in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from common.errors import TriptychError
from common.messages import MediaKind
from proxy.exchange import Exchange, Json, Payload, Sse
from proxy.generation import Delta, Usage
from proxy.jobs import Job, MediaItem, make_slots
from proxy.media import MediaSource
from proxy.openai_types import AudioPart, ChatRequest, ImagePart, Message, TextPart, parse
from proxy.service import Service
from proxy.speech import Speech


async def chat_completions(service: Service, exchange: Exchange) -> AsyncGenerator[Payload]:
    """The answer to one chat request, whole or as a stream."""
    body = await parse(ChatRequest, exchange)
    service.check_model(body.model)
    sources = collect_media(body.messages, service.info.media_kind, service.model_name)
    media = await service.intake.load(sources)
    if service.info.is_encoder_decoder:
        deltas, usage = _transcribe(service, exchange, body, media)
    else:
        deltas, usage = await _generate(service, exchange, body, media)
    async with aclosing(deltas):
        if body.stream:
            async for event in _stream(service, exchange, body, deltas, usage):
                yield event
        else:
            yield await _collect(service, exchange, body, deltas, usage)


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
            content = [
                {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
                for part in message.content
            ]
        else:
            content = "\n".join(part.text for part in message.content if isinstance(part, TextPart))
        rendered.append({"role": role, "content": content})
    return rendered


async def _generate(
    service: Service, exchange: Exchange, body: ChatRequest, media: list[MediaItem]
) -> tuple[AsyncGenerator[Delta], Usage]:
    if body.language is not None:
        message = f"language is for speech models, {service.model_name} is none"
        raise TriptychError("invalid_request", message, "language")
    messages = template_messages(body.messages, service.info.media_kind is not None)
    prompt = await asyncio.to_thread(service.text.render_chat, messages)
    slots = make_slots(media, service.text.placeholder_indices(prompt, len(media)))
    limit = service.token_limit(len(prompt), body.token_limit, "messages")
    job = Job(exchange.id, prompt, body.sampling(limit), slots, media)
    generation = service.generation(job, exchange)
    return service.deltas(generation, exchange), generation.usage


def _transcribe(
    service: Service, exchange: Exchange, body: ChatRequest, media: list[MediaItem]
) -> tuple[AsyncGenerator[Delta], Usage]:
    """A speech model in a conversation: it writes down the one clip; text beside it is the hint of what came before."""
    if len(media) != 1:
        message = f"{service.model_name} transcribes one input_audio part per request, not {len(media)}"
        raise TriptychError("invalid_request", message, "messages")
    sampling = body.sampling(service.max_model_len, default_temperature=0.0)
    speech = Speech(service, exchange, media[0], sampling, body.token_limit)
    texts = [message["content"] for message in template_messages(body.messages, with_media=False)]
    return speech.deltas(body.language, "\n".join(filter(None, texts)) or None), speech.usage


async def _collect(
    service: Service, exchange: Exchange, body: ChatRequest, deltas: AsyncGenerator[Delta], usage: Usage
) -> Json:
    text, finish = "", None
    token_ids: list[int] = []
    async for delta in deltas:
        text += delta.text
        token_ids += delta.token_ids
        finish = delta.finish_reason
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text, "refusal": None},
        "logprobs": None,
        "finish_reason": finish,
        **body.told(token_ids),
    }
    return Json({**_head(service, exchange, "chat.completion"), "choices": [choice], "usage": usage.to_json()})


async def _stream(
    service: Service, exchange: Exchange, body: ChatRequest, deltas: AsyncGenerator[Delta], usage: Usage
) -> AsyncGenerator[Payload]:
    head = _head(service, exchange, "chat.completion.chunk")
    extra: dict[str, Any] = {"usage": None} if body.wants_usage_event else {}
    role: dict[str, str] = {"role": "assistant"}
    async for delta in deltas:
        told = body.told(delta.token_ids)
        if role or delta.text:
            choice = {"index": 0, "delta": {**role, "content": delta.text}, "logprobs": None, "finish_reason": None}
            yield Sse({**head, "choices": [{**choice, **told}], **extra})
            role, told = {}, body.told(())
        if delta.finish_reason is not None:
            last = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": delta.finish_reason}
            yield Sse({**head, "choices": [{**last, **told}], **extra})
    if body.wants_usage_event:
        yield Sse({**head, "choices": [], "usage": usage.to_json()})
    yield Sse(None)


def _head(service: Service, exchange: Exchange, kind: str) -> dict[str, Any]:
    return {"id": exchange.id, "object": kind, "created": int(exchange.arrival_s), "model": service.model_name}
