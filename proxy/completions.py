"""POST /v1/completions: text from text or token ids, several prompts at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

from common.errors import TriptychError
from proxy.exchange import Exchange, Json, Payload, Sse
from proxy.generation import Delta, Generation, Usage
from proxy.jobs import Job, part_id
from proxy.merge import merge
from proxy.openai_types import CompletionRequest, parse
from proxy.service import Service

MAX_PROMPTS: Final = 128


async def completions(service: Service, exchange: Exchange) -> AsyncGenerator[Payload]:
    """One choice per prompt, whole or as one stream of all of them."""
    body = await parse(CompletionRequest, exchange)
    service.check_model(body.model)
    generations = await _make_generations(service, exchange, body)
    merged = merge([service.deltas(generation, exchange) for generation in generations])
    async with aclosing(merged):
        if body.stream:
            async for event in _stream(service, exchange, body, generations, merged):
                yield event
        else:
            yield await _collect(service, exchange, body, generations, merged)


async def _make_generations(service: Service, exchange: Exchange, body: CompletionRequest) -> list[Generation]:
    if service.info.is_encoder_decoder:
        message = f"{service.model_name} needs audio: use /v1/audio/transcriptions or /v1/chat/completions"
        raise TriptychError("invalid_request", message, "model")
    prompts = body.prompts
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise TriptychError("invalid_request", f"prompt takes 1 to {MAX_PROMPTS} prompts, not {len(prompts)}", "prompt")
    generations = []
    for index, prompt in enumerate(prompts):
        ids = await _token_ids(service, prompt)
        job_id = exchange.id if len(prompts) == 1 else part_id(exchange.id, index)
        job = Job(job_id, ids, body.sampling(service.token_limit(len(ids), body.max_tokens, "prompt")))
        generations.append(service.generation(job, exchange))
    return generations


async def _token_ids(service: Service, prompt: str | list[int]) -> list[int]:
    """A prompt as token ids. Raises TriptychError("invalid_request") where it is empty or none of this model's."""
    ids = await asyncio.to_thread(service.text.encode, prompt) if isinstance(prompt, str) else prompt
    if not ids:
        raise TriptychError("invalid_request", "the prompt is empty", "prompt")
    wrong = next((token for token in ids if not 0 <= token < service.info.vocab_size), None)
    if wrong is not None:
        message = f"token id {wrong} is not in the vocabulary of {service.info.vocab_size}"
        raise TriptychError("invalid_request", message, "prompt")
    if service.info.placeholder_token_id in ids:
        message = "the prompt contains a media placeholder; send media with /v1/chat/completions"
        raise TriptychError("invalid_request", message, "prompt")
    return ids


async def _collect(
    service: Service,
    exchange: Exchange,
    body: CompletionRequest,
    generations: list[Generation],
    merged: AsyncGenerator[tuple[int, Delta]],
) -> Json:
    choices = [_choice(index, "", None) for index in range(len(generations))]
    async for index, delta in merged:
        choices[index]["text"] += delta.text
        choices[index]["finish_reason"] = delta.finish_reason
    for choice, generation in zip(choices, generations, strict=True):
        choice.update(body.told(generation.token_ids))
    return Json({**_head(service, exchange), "choices": choices, "usage": _usage(generations)})


async def _stream(
    service: Service,
    exchange: Exchange,
    body: CompletionRequest,
    generations: list[Generation],
    merged: AsyncGenerator[tuple[int, Delta]],
) -> AsyncGenerator[Payload]:
    head = _head(service, exchange)
    extra: dict[str, Any] = {"usage": None} if body.wants_usage_event else {}
    async for index, delta in merged:
        choice = {**_choice(index, delta.text, delta.finish_reason), **body.told(delta.token_ids)}
        yield Sse({**head, "choices": [choice], **extra})
    if body.wants_usage_event:
        yield Sse({**head, "choices": [], "usage": _usage(generations)})
    yield Sse(None)


def _choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _usage(generations: list[Generation]) -> dict[str, Any]:
    total = Usage()
    for generation in generations:
        total.add(generation.usage)
    return total.to_json()


def _head(service: Service, exchange: Exchange) -> dict[str, Any]:
    return {
        "id": exchange.id,
        "object": "text_completion",
        "created": int(exchange.arrival_s),
        "model": service.model_name,
    }
