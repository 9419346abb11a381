"""POST /v1/chat/completions: a conversation with text, images or audio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final

from common.errors import invalid
from common.messages import MediaKind
from common.text import whisper_prompt
from common.text.processor import TextProcessor
from proxy.api.logprobs import LogprobShapes, check_prompt_logprobs
from proxy.api.openai_types import AudioPart, AudioUrlPart, ChatRequest, ImagePart, Message, TextPart, parse
from proxy.api.prompts import processed_prompts
from proxy.api.speech import Speech, SpeechOptions
from proxy.dispatch.jobs import Job, MediaItem, make_slots
from proxy.dispatch.text_stream import Choice, Delta, TextStream, best
from proxy.media.intake import MediaSource
from proxy.server.limits import RequestTickets
from proxy.server.request_context import Json, Payload, RequestContext, Sse
from proxy.service import LineName, Service

_PLACEHOLDERS: Final[dict[str, dict[str, str]]] = {
    "image_url": {"type": "image"},
    "input_audio": {"type": "audio", "audio": ""},
    "audio_url": {"type": "audio", "audio": ""},
}
"""Media in chat templates, which look for the type or for a key named like the media."""


async def chat_completions(service: Service, context: RequestContext) -> AsyncGenerator[Payload]:
    """Answer one chat request, whole or as a stream."""
    lines: tuple[LineName, ...] = ("text",) if service.info.media_kind is None else ("text", "media")
    service.check_lines(*(("media",) if service.transcribes else lines))
    body = await parse(ChatRequest, context)
    service.check_model(body.model)
    if service.info.media_kind == "text":
        message = f"{service.model_name} is an encoder-decoder model of text and holds no conversations"
        raise invalid(f"{message}: use /v1/completions", "model")
    sources = collect_media(body.messages, service.info.media_kind, service.model_name)
    tickets = service.join_line(context, "media" if sources else "text")
    media = await service.intake.load(sources, context.held)
    if service.transcribes:
        source: TextStream | Speech = _transcribe(service, context, tickets, body, media)
    else:
        source = await _generate(service, context, tickets, body, media)
    answer = _ChatAnswer(
        body,
        service.text,
        source,
        LogprobShapes(service.token_texts, body.num_logprobs or 0, bool(body.return_tokens_as_token_ids)),
        {
            "id": context.id,
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(context.created_s),
            "model": service.model_name,
        },
    )
    async with aclosing(source.deltas()) as deltas:
        if not body.stream:
            choices = [Choice() for _ in range(body.width if body.picks_best else body.num_choices)]
            async for delta in deltas:
                choices[delta.index].add(delta)
            yield answer.whole(best(choices, body.num_choices))
            return
        async for delta in deltas:
            for chunk in answer.chunks(delta):
                yield chunk
    if body.wants_usage_event:
        yield Sse({**answer.head, "choices": [], "usage": source.usage.to_json()})
    yield Sse(None)


@dataclass
class _ChatAnswer:
    """An answer under way; `head` are the fields that all its chunks share."""

    body: ChatRequest
    text: TextProcessor
    source: TextStream | Speech
    shapes: LogprobShapes
    head: dict[str, Any]
    _begun: set[int] = field(default_factory=set)

    def whole(self, choices: Sequence[Choice]) -> Json:
        """Return the complete answer."""
        body = self.body
        value: dict[str, Any] = {**self.head}
        value["choices"] = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": None if body.num_logprobs is None else self.shapes.chat(choice.logprobs),
                "finish_reason": choice.finish_reason,
                **body.token_ids_of(choice.token_ids),
                **({"score": choice.score} if body.use_beam_search else {}),
                **self._prompts(index),
            }
            for index, choice in enumerate(choices)
        ]
        if body.prompt_logprobs is not None and isinstance(self.source, TextStream):
            value["prompt_logprobs"] = self.shapes.prompt(self.source.prompt_logprobs)
        return Json({**value, "usage": self.source.usage.to_json()})

    def chunks(self, delta: Delta) -> Iterator[Sse]:
        """Yield the events of a delta: the text, then the end of the sequence."""
        body, index = self.body, delta.index
        logprobs = None if body.num_logprobs is None else self.shapes.chat(delta.logprobs)
        rest = {"logprobs": logprobs, **body.token_ids_of(delta.token_ids)}
        choices: list[dict[str, Any]] = []
        if delta.text or index not in self._begun:
            role = {} if index in self._begun else {"role": "assistant"}
            self._begun.add(index)
            content = {**role, "content": delta.text}
            prompts = self._prompts(index) if role else {}
            choices.append({"index": index, "delta": content, "finish_reason": None, **rest, **prompts})
            rest = {"logprobs": None, **body.token_ids_of(())}
        if delta.finish_reason is not None:
            choices.append({"index": index, "delta": {}, "finish_reason": delta.finish_reason, **rest})
        for choice in choices:
            yield Sse({**self.head, "choices": [choice], **body.chunk_usage(self.source.usage)})

    def _prompts(self, index: int) -> dict[str, Any]:
        return processed_prompts(self.text, self.source.job) if self.body.return_prompts and index == 0 else {}


def collect_media(messages: list[Message], kind: MediaKind | None, model: str) -> list[MediaSource]:
    """Return the media of a conversation in order of appearance.

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
            raise invalid(message_text, source.param)
    return sources


def template_messages(messages: list[Message], with_media: bool) -> list[dict[str, Any]]:
    """Return messages for chat templates: parts for a model with media, plain text for any other."""
    rendered = []
    for message in messages:
        role = "system" if message.role == "developer" else message.role
        content: str | list[dict[str, str]]
        if not isinstance(message.content, list):
            content = message.content or ""
        elif with_media:
            content = [
                {"type": "text", "text": part.text} if isinstance(part, TextPart) else _PLACEHOLDERS[part.type]
                for part in message.content
            ]
        else:
            content = "\n".join(part.text for part in message.content if isinstance(part, TextPart))
        rendered.append({"role": role, "content": content})
    return rendered


async def _generate(
    service: Service, context: RequestContext, tickets: RequestTickets, body: ChatRequest, media: list[MediaItem]
) -> TextStream:
    for name in ("language", "decoder_prompt"):
        if getattr(body, name) is not None:
            raise invalid(f"{name} is for speech models, {service.model_name} is none", name)
    messages = template_messages(body.messages, service.info.media_kind is not None)
    prompt = await asyncio.to_thread(
        service.text.render_chat,
        messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        chat_template_kwargs=body.chat_template_kwargs,
    )
    slots = make_slots(media, service.text.placeholder_indices(prompt, len(media)))
    limit = service.token_limit(len(prompt), body.max_completion_tokens or body.max_tokens, "messages")
    sampling = body.sampling(service.text, limit, service.sampling_defaults)
    if sampling.prompt_logprobs is not None:
        check_prompt_logprobs(sampling.prompt_logprobs, len(prompt))
    job = Job(context.id, prompt, sampling, slots, media, body.priority or 0, body.field_of)
    skip_special_tokens = body.skip_special_tokens is not False
    return service.generate(job, context, tickets.acquire(), skip_special_tokens=skip_special_tokens)


def _transcribe(
    service: Service, context: RequestContext, tickets: RequestTickets, body: ChatRequest, media: list[MediaItem]
) -> Speech:
    """Transcribe the one audio input of a conversation; text beside it is the hint of earlier speech."""
    if len(media) != 1:
        message = f"{service.model_name} transcribes one clip (input_audio or audio_url) per request, not {len(media)}"
        raise invalid(message, "messages")
    for name, used in (
        ("n", body.num_choices > 1 or body.picks_best),
        ("prompt_logprobs", body.prompt_logprobs),
        ("chat_template_kwargs", body.chat_template_kwargs),
        ("continue_final_message", body.continue_final_message),
        ("add_generation_prompt", body.add_generation_prompt is False),
    ):
        if used:
            message = f"{name} is not available for a speech model: a clip has one transcript, and no template"
            raise invalid(message, name)
    sampling = body.sampling(service.text, service.max_model_len, {"temperature": 0.0})
    texts = [message["content"] for message in template_messages(body.messages, with_media=False)]
    told = whisper_prompt.options(
        service.info,
        service.text,
        decoder_prompt=body.decoder_prompt,
        language=body.language,
        prompt="\n".join(filter(None, texts)) or None,
    )
    options = SpeechOptions(
        **told,
        token_limit=body.max_completion_tokens or body.max_tokens,
        priority=body.priority or 0,
    )
    return Speech(service, context, tickets, media[0], sampling, options)
