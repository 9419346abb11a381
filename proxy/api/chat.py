"""POST /v1/chat/completions: a conversation with text, images, audio or videos."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, Final

from fastapi.responses import Response

from common.errors import invalid
from common.media.videos import prompt_text
from common.messages import MediaKind
from common.text import whisper_prompt
from common.text.processor import TextProcessor, text_of
from common.text.prompts import ParsedPrompt, with_checkpoint_rules
from proxy.api.logprobs import LogprobShapes
from proxy.api.openai_types import ChatRequest, Message, RefusalPart, TextPart, parse
from proxy.api.prompts import job_of_pair, processed_prompts, sampling_within
from proxy.api.speech import Speech, SpeechOptions
from proxy.api.tools import CallDeltas, joined_text
from proxy.conversation.dialect import Dialect, explained
from proxy.conversation.parts import AnswerParser, AnswerPart
from proxy.conversation.thinking import BEGIN, END, ThinkParser
from proxy.dispatch.jobs import Job, MediaItem, make_slots
from proxy.dispatch.text_stream import Choice, Delta, TextStream, best
from proxy.media.intake import MediaSource
from proxy.server.limits import RequestTickets
from proxy.server.request_context import Payload, RequestContext, Sse, json_answer
from proxy.service import Service

_MEDIA: Final[dict[str, tuple[MediaKind, dict[str, str]]]] = {
    "image_url": ("image", {"type": "image"}),
    "input_audio": ("audio", {"type": "audio", "audio": ""}),
    "audio_url": ("audio", {"type": "audio", "audio": ""}),
    "video_url": ("video", {"type": "video"}),
}
"""Kind of a part, and its form in chat templates, which look for the type or for a key named like the media."""


async def chat_completions(service: Service, context: RequestContext) -> AsyncGenerator[Payload]:
    """Answer one chat request, whole or as a stream."""
    service.check_lines(*service.chat_lines)
    body = await parse(ChatRequest, context)
    service.check_model(body.model)
    answer = await begin_answer(service, context, body)
    async with aclosing(answer.source.deltas()) as deltas:
        if not body.stream:
            yield await asyncio.to_thread(answer.whole, await answer.choices(deltas))
            return
        async for delta in deltas:
            for chunk in answer.chunks(delta):
                yield chunk
    if body.wants_usage_event:
        yield Sse({**answer.head, "choices": [], "usage": answer.source.usage.to_json()})
    yield Sse(None)


async def begin_answer(service: Service, context: RequestContext, body: ChatRequest) -> ChatAnswer:
    """Load the media, make the prompt, and return the answer, which starts with the first delta of its source.

    Raises TriptychError for what the model cannot take, and Overloaded.
    """
    if service.info.media_kind == "text":
        message = f"{service.model_name} is an encoder-decoder model of text and holds no conversations"
        raise invalid(f"{message}: use /v1/completions", "model")
    sources = collect_media(body.messages, service.info.media_kinds, service.model_name)
    tickets = service.join_line(context, "media" if sources else "text")
    media = await service.intake.load(sources, context.held)
    opened = None
    if service.transcribes:
        source: TextStream | Speech = _transcribe(service, context, tickets, body, media)
    else:
        source, opened = await _generate(service, context, tickets, body, media)
    head = {
        "id": context.id,
        "object": "chat.completion.chunk" if body.stream else "chat.completion",
        "created": int(context.created_s),
        "model": body.model or service.model_name,
    }
    shapes = LogprobShapes(service.token_texts, body.num_logprobs or 0, bool(body.return_tokens_as_token_ids))
    return ChatAnswer(body, service, source, opened, head, shapes)


@dataclass
class ChatAnswer:
    """An answer under way; `head` are the fields that all its chunks share.

    `opened` is None where no reasoning is looked for, else whether the prompt ends within reasoning.
    """

    body: ChatRequest
    service: Service
    source: TextStream | Speech
    opened: bool | None
    head: dict[str, Any]
    shapes: LogprobShapes
    _parsers: dict[int, AnswerParser] = field(default_factory=dict)
    _calls: dict[int, CallDeltas] = field(default_factory=dict)

    async def choices(self, deltas: AsyncGenerator[Delta]) -> list[Choice]:
        """Return the complete choices."""
        body = self.body
        choices = [Choice() for _ in range(body.width if body.picks_best else body.num_choices)]
        async for delta in deltas:
            choices[delta.index].add(delta)
        return best(choices, body.num_choices)

    def parts(self, index: int, text: str, *, final: bool) -> list[AnswerPart]:
        """Return what the next text of a choice adds to reasoning, text and calls."""
        parser = self._parsers.get(index)
        if parser is None:
            thinking = None if self.opened is None else ThinkParser(opened=self.opened)
            parser = self._parsers[index] = AnswerParser(thinking, self.body.call_parser(self.service.dialect))
            self._calls[index] = CallDeltas(self.service.dialect)
        return parser.feed(text, final=final)

    def whole(self, choices: Sequence[Choice]) -> Response:
        """Return the complete answer. Log-probabilities take seconds, which no other request should wait."""
        body = self.body
        value: dict[str, Any] = {**self.head}
        value["choices"] = [
            {
                "index": index,
                "message": self._message(index, choice),
                "logprobs": None if body.num_logprobs is None else self.shapes.chat(choice.logprobs),
                "finish_reason": self._finish(index, choice.finish_reason),
                **body.token_ids_of(choice.token_ids),
                **({"score": choice.score} if body.use_beam_search else {}),
                **self._prompts(index),
            }
            for index, choice in enumerate(choices)
        ]
        if body.prompt_logprobs is not None and isinstance(self.source, TextStream):
            value["prompt_logprobs"] = self.shapes.prompt(self.source.prompt_logprobs)
        return json_answer({**value, "usage": self.source.usage.to_json()})

    def _message(self, index: int, choice: Choice) -> dict[str, Any]:
        parts = self.parts(index, choice.text, final=True)
        calls = self._calls[index].whole(part for part in parts if part.kind in ("call", "arguments"))
        text = joined_text(parts, "content")
        message = {"role": "assistant", "content": None if calls and not text else text, "refusal": None}
        return {**message, **_reasoning(joined_text(parts, "reasoning")), **({"tool_calls": calls} if calls else {})}

    def _finish(self, index: int, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self._calls[index].count else reason

    def chunks(self, delta: Delta) -> Iterator[Sse]:
        """Yield the events of a delta: its parts, then the end of the sequence."""
        body, index = self.body, delta.index
        begins = index not in self._parsers
        deltas = [self._delta(index, part) for part in self.parts(index, delta.text, final=bool(delta.finish_reason))]
        logprobs = None if body.num_logprobs is None else self.shapes.chat(delta.logprobs)
        rest = {"logprobs": logprobs, **body.token_ids_of(delta.token_ids)}
        if begins:
            first = deltas[0] if deltas else {"content": ""}
            nothing = {"content": None} if "tool_calls" in first else {}
            deltas[:1] = [{"role": "assistant", **nothing, **first}]
        elif not deltas and delta.finish_reason is None and (logprobs or body.return_token_ids):
            deltas = [{}]  # the text is held back, its tokens are not
        choices: list[dict[str, Any]] = [{"index": index, "delta": one, "finish_reason": None} for one in deltas]
        if delta.finish_reason is not None:
            choices.append({"index": index, "delta": {}, "finish_reason": self._finish(index, delta.finish_reason)})
            choices[-1] |= {"score": delta.score} if body.use_beam_search else {}
        for number, choice in enumerate(choices):
            extra = rest if number == 0 else {"logprobs": None, **body.token_ids_of(())}
            prompts = self._prompts(index) if begins and number == 0 else {}
            event = {**choice, **extra, **prompts}
            yield Sse({**self.head, "choices": [event], **body.chunk_usage(self.source.usage)})

    def _delta(self, index: int, part: AnswerPart) -> dict[str, Any]:
        if part.kind == "content":
            return {"content": part.text}
        if part.kind == "reasoning":
            return _reasoning(part.text)
        return {"tool_calls": [self._calls[index].delta(part)]}

    def _prompts(self, index: int) -> dict[str, Any]:
        text = self.service.text
        return processed_prompts(text, self.source.job) if self.body.return_prompts and index == 0 else {}


def _reasoning(text: str) -> dict[str, Any]:
    """Return reasoning by both of its names: DeepSeek's, read by most clients, and vLLM's newer one."""
    return {"reasoning_content": text, "reasoning": text} if text else {}


def collect_media(messages: list[Message], kinds: Sequence[MediaKind], model: str) -> list[MediaSource]:
    """Return the media of a conversation in order of appearance, and take their data out of it.

    Raises TriptychError("invalid_request") for media that the model does not take.
    """
    sources = []
    for i, message in enumerate(messages):
        for j, part in enumerate(message.content if isinstance(message.content, list) else []):
            if isinstance(part, TextPart | RefusalPart):
                continue
            kind, given = _MEDIA[part.type][0], getattr(part, part.type)
            name = "data" if part.type == "input_audio" else "url"
            where = f"messages[{i}].content[{j}].{part.type}.{name}"
            if kind not in kinds:
                takes = f"{' and '.join(kinds)} input only" if kinds else "text only"
                raise invalid(f"{where}: {model} takes {takes}, not {kind} input", where)
            sources.append(MediaSource(kind, where, **{name: getattr(given, name)}))
            setattr(given, name, "")  # the base64 of a video would last as long as the answer
    return sources


def template_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Return messages for chat templates."""
    rendered = []
    for message in messages:
        role = "system" if message.role == "developer" else message.role
        content: str | list[dict[str, str]]
        if not isinstance(message.content, list):
            content = message.content or ""
        else:
            content = [
                {"type": "text", "text": part.text}
                if isinstance(part, TextPart | RefusalPart)
                else _MEDIA[part.type][1]
                for part in message.content
            ]
        rendered.append({"role": role, "content": content, **_further(message)})
    return rendered


def _further(message: Message) -> dict[str, Any]:
    """Return the speaker's name and the fields of calls, results and reasoning for a chat template."""
    found: dict[str, Any] = {"name": message.name}
    if message.role == "tool":
        found["tool_call_id"] = message.tool_call_id
    elif message.tool_calls:
        calls = message.tool_calls
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": call.function.for_template()} for call in calls
        ]
    reasoning = message.reasoning_content or message.reasoning
    if reasoning is not None and message.role == "assistant":
        found["reasoning_content"] = reasoning
    return {name: value for name, value in found.items() if value is not None}


def make_prompt(text: TextProcessor, dialect: Dialect, body: ChatRequest) -> tuple[list[int], bool | None]:
    """Return the prompt of a conversation, and `opened` as in ChatAnswer.

    An answer that may not think, by choice or because of its form, begins behind the end of reasoning.
    Raises TriptychError("invalid_request") where the template refuses, and as `TextProcessor.encode_chat` does.
    """
    messages, variables = template_messages(body.messages), body.template_variables()
    tools = [one.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for one in body.usable_tools]
    if not dialect.knows_tools and (tools or any(one.tool_calls or one.role == "tool" for one in body.messages)):
        messages, tools = explained(messages, tools), []
    prompt = text.chat_text(
        messages,
        tools=tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        chat_template_kwargs=variables,
    )
    opened = None
    if dialect.thinks:
        opened = prompt.rstrip().endswith(BEGIN)
        if variables.get("enable_thinking") is False:
            prompt = f"{prompt.rstrip()}\n\n{END}\n\n" if opened else prompt
            opened = None
    return text.encode_chat(prompt), opened


async def _generate(
    service: Service, context: RequestContext, tickets: RequestTickets, body: ChatRequest, media: list[MediaItem]
) -> tuple[TextStream, bool | None]:
    """Return the text of an answer, and `opened` as in ChatAnswer."""
    for name, kind in (("language", "speech"), ("decoder_prompt", "encoder-decoder")):
        if getattr(body, name) is not None and not (name == "decoder_prompt" and service.info.is_encoder_decoder):
            raise invalid(f"{name} is for {kind} models, {service.model_name} is none", name)
    prompt, opened = await asyncio.to_thread(make_prompt, service.text, service.dialect, body)
    wanted = body.max_completion_tokens or body.max_tokens
    sampling = partial(sampling_within, service, body, wanted, "messages")
    if service.info.is_encoder_decoder:
        prompts = prompt, body.decoder_prompt
        job = await job_of_pair(service, body, context.id, prompts, sampling, "messages", media)
    else:
        pieces = [list(pieces) for _, pieces in groupby(media, key=lambda item: item.param)]
        texts = [prompt_text(first.data) for first, *_ in pieces if first.kind == "video"]
        prompt = await asyncio.to_thread(service.text.write_videos, prompt, texts)
        prompt = service.text.repeat_placeholders(prompt, list(map(len, pieces)))
        prompt = body.shortened(prompt, service.max_model_len, len(media))
        slots = make_slots(media, service.text.placeholder_indices(prompt, len(media)))
        params = with_checkpoint_rules(service.info, sampling(len(prompt)), ParsedPrompt(prompt))
        job = Job(context.id, prompt, params, slots, media, body.priority or 0, body.field_of)
    marks = {BEGIN, END} if opened is not None else set()
    if body.usable_tools and service.dialect.call_parser is not None and not body.forces_call:
        marks.add(service.dialect.call_parser.marker)
    how = {**body.text_options(), "continues_prompt": bool(body.continue_final_message)}
    how["skip_special_tokens"] &= not marks & service.special_texts
    return service.generate(job, context, tickets.acquire(), **how), opened


def _transcribe(
    service: Service, context: RequestContext, tickets: RequestTickets, body: ChatRequest, media: list[MediaItem]
) -> Speech:
    """Transcribe the one audio input of a conversation; text beside it is the hint of earlier speech."""
    if len(media) != 1:
        message = f"{service.model_name} writes down speech: send one clip (input_audio or audio_url), not {len(media)}"
        raise invalid(message, "messages")
    for name, used in (
        ("n", body.num_choices > 1 or body.picks_best),
        ("prompt_logprobs", body.prompt_logprobs is not None),
        ("chat_template_kwargs", body.chat_template_kwargs),
        ("continue_final_message", body.continue_final_message),
        ("add_generation_prompt", body.add_generation_prompt is False),
        ("tools", body.usable_tools),
        ("skip_special_tokens", body.skip_special_tokens is False),
        ("include_stop_str_in_output", body.include_stop_str_in_output),
        ("truncate_prompt_tokens", body.truncate_prompt_tokens),
    ):
        if used:
            message = f"{name} is not available for a speech model: a clip has one transcript, and no template"
            raise invalid(message, name)
    sampling = body.sampling(service.text, service.max_model_len, service.sampling_defaults | {"temperature": 0.0})
    texts = [text_of(message["content"]) for message in template_messages(body.messages)]
    told = whisper_prompt.options(
        service.info,
        service.text,
        decoder_prompt=body.decoder_prompt,
        language=body.language,
        prompt="\n".join(filter(None, texts)) or None,
    )
    limit = body.max_completion_tokens or body.max_tokens
    options = SpeechOptions(**told, total_limit=limit, priority=body.priority or 0)
    return Speech(service, context, tickets, media[0], sampling, options)
