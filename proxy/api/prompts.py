"""The prompts of a text completion as jobs, for decoder-only and for encoder-decoder models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from common.errors import TriptychError, invalid
from common.sampling_params import SamplingParams
from common.text.processor import TextProcessor
from common.text.prompts import (
    ParsedPrompt,
    decode_tokens,
    encode_tokens,
    join_media,
    parse_prompt,
    split_media,
    with_checkpoint_rules,
)
from proxy.api.logprobs import check_prompt_logprobs
from proxy.api.openai_types import CompletionRequest, Prompt, as_prompts
from proxy.api.sampling_fields import GenerationRequest
from proxy.dispatch.jobs import Job, MediaItem, make_slots, part_id
from proxy.server.errors import unsupported
from proxy.server.request_context import RequestContext
from proxy.service import Service

MAX_PROMPTS: Final = 128
MAX_SEQUENCES: Final = 1024
"""Limit over all prompts of a request."""


def check_number(body: CompletionRequest) -> None:
    """Raise TriptychError("invalid_request") for too many prompts or sequences."""
    prompts = body.prompts
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise invalid(f"prompt takes 1 to {MAX_PROMPTS} prompts, not {len(prompts)}", "prompt")
    if len(prompts) * body.width > MAX_SEQUENCES:
        message = f"{len(prompts)} prompts of {body.width} sequences each are more than {MAX_SEQUENCES} sequences"
        raise invalid(message, "n" if body.best_of is None else "best_of")


async def make_jobs(service: Service, context: RequestContext, body: CompletionRequest) -> list[Job]:
    """Return a job per prompt. Raises TriptychError("invalid_request") naming a field that the model cannot take."""
    info, prompts = service.info, body.prompts
    if info.is_encoder_decoder and info.media_kind != "text":
        needs = "audio: use /v1/audio/transcriptions or" if service.transcribes else f"an {info.media_kind}: use"
        raise invalid(f"{service.model_name} needs {needs} /v1/chat/completions", "model")
    parts = [context.id] if len(prompts) == 1 else [part_id(context.id, index) for index in range(len(prompts))]
    if not info.is_encoder_decoder:
        if body.decoder_prompt is not None or body.encoder_prompt is not None:
            field = "decoder_prompt" if body.decoder_prompt is not None else "encoder_prompt"
            raise invalid(f"{field} is for encoder-decoder models, {service.model_name} is none: use prompt", field)
        return [await _decoder_job(service, body, *both) for both in zip(parts, prompts, strict=True)]
    return [
        await _encoder_decoder_job(service, body, part, prompt, decoder_prompt)
        for part, prompt, decoder_prompt in zip(parts, prompts, decoder_prompts(body), strict=True)
    ]


def processed_prompts(text: TextProcessor, job: Job) -> dict[str, Any]:
    """Return the prompts of a job as the model gets them, texts and token ids, for `return_prompts`.

    A media item is a token, or of an encoder-decoder model no text at all.
    """
    prompts: dict[str, list[int] | None] = {"prompt": job.prompt_token_ids}
    if text.info.is_encoder_decoder:
        [item] = job.media
        encoder = split_media(item.data)[0] if text.info.family.reads_text else None
        encoder = decode_tokens(item.data) if item.kind == "text" else encoder
        prompts = {"encoder_prompt": encoder, "decoder_prompt": job.prompt_token_ids}
    found: dict[str, Any] = {}
    for name, ids in prompts.items():
        found[name] = None if ids is None else text.decode(ids, skip_special_tokens=False)
        found[f"{name}_token_ids"] = ids
    return found


async def _decoder_job(service: Service, body: CompletionRequest, request_id: str, prompt: Prompt) -> Job:
    if isinstance(prompt, str):
        special = body.add_special_tokens is not False
        ids = await asyncio.to_thread(service.text.encode_prompt, prompt, "prompt", add_special_tokens=special)
    else:
        ids = prompt
    if not ids:
        raise invalid("the prompt is empty", "prompt")
    ids = body.shortened(ids, service.max_model_len)
    service.token_limit(len(ids), None, "prompt")  # before a scan of all tokens on the event loop
    wrong = next((token for token in ids if not 0 <= token < service.info.vocab_size), None)
    if wrong is not None:
        raise invalid(f"token id {wrong} is not in the vocabulary of {service.info.vocab_size}", "prompt")
    if not service.info.placeholders.keys().isdisjoint(ids):
        raise invalid("the prompt contains a media placeholder; send media with /v1/chat/completions", "prompt")
    params = with_checkpoint_rules(service.info, _sampling(service, body, len(ids)), ParsedPrompt(ids))
    return Job(request_id, ids, params, priority=body.priority or 0, field_of=body.field_of)


async def _encoder_decoder_job(
    service: Service, body: CompletionRequest, request_id: str, prompt: Prompt, decoder_prompt: Prompt | None
) -> Job:
    own = "prompt" if body.encoder_prompt is None else "encoder_prompt"
    if body.add_special_tokens is False:
        encode = partial(service.text.encode_prompt, add_special_tokens=False)
        if isinstance(prompt, str):
            prompt = await asyncio.to_thread(encode, prompt, own)
        if isinstance(decoder_prompt, str):
            decoder_prompt = await asyncio.to_thread(encode, decoder_prompt, "decoder_prompt")
    prompts = prompt, decoder_prompt
    return await job_of_pair(service, body, request_id, prompts, partial(_sampling, service, body), own)


async def job_of_pair(
    service: Service,
    body: GenerationRequest,
    request_id: str,
    prompts: tuple[Prompt, Prompt | None],
    sampling: Callable[[int], SamplingParams],
    own: str,
    media: Sequence[MediaItem] = (),
) -> Job:
    """Make a job of the prompts for encoder and decoder, with the encoder's, and the media in it, as the one input.

    `sampling` is called with the number of the decoder's prompt tokens; `own` is the field of the encoder's prompt.
    """
    if body.truncate_prompt_tokens is not None:
        raise unsupported("truncate_prompt_tokens", body.truncate_prompt_tokens)
    parsed, item = await asyncio.to_thread(_parse_pair, service, prompts, own, media)
    params = with_checkpoint_rules(service.info, sampling(len(parsed.prompt_token_ids)), parsed)
    return Job(
        request_id,
        parsed.prompt_token_ids,
        params,
        make_slots([item], None),
        [item],
        priority=body.priority or 0,
        field_of=body.field_of,
        num_encoder_prompt_tokens=len(parsed.encoder_prompt_token_ids or ()),
    )


def _parse_pair(
    service: Service, prompts: tuple[Prompt, Prompt | None], own: str, media: Sequence[MediaItem]
) -> tuple[ParsedPrompt, MediaItem]:
    encoder: Any = prompts[0]
    if service.info.family.reads_text:
        encoder = {"prompt_token_ids": encoder, "multi_modal_data": {"image": list(media)}}
    try:
        parsed = parse_prompt({"encoder_prompt": encoder, "decoder_prompt": prompts[1]}, service.info, service.text)
    except TriptychError as error:
        param = own if error.info.param in ("encoder_prompt", "multi_modal_data") else error.info.param
        raise TriptychError(error.info.code, error.info.message, param) from error
    ids = parsed.encoder_prompt_token_ids or []
    if not media:
        return parsed, MediaItem.of("text", encode_tokens(ids), own)
    return parsed, MediaItem.of(media[0].kind, join_media(ids, media[0].data), media[0].param)


def decoder_prompts(body: CompletionRequest) -> list[Prompt] | list[None]:
    """Return a decoder prompt for each prompt; a single decoder prompt counts for all."""
    wanted = len(body.prompts)
    if body.decoder_prompt is None:
        return [None] * wanted
    given = as_prompts(body.decoder_prompt)
    if len(given) not in (1, wanted):
        message = f"{len(given)} decoder prompts for {wanted} prompts: give one for all, or one each"
        raise invalid(message, "decoder_prompt")
    return given if len(given) == wanted else given * wanted


def _sampling(service: Service, body: CompletionRequest, num_prompt_tokens: int) -> SamplingParams:
    """Return the sampling for a prompt. With max_tokens=0 a hidden token is generated, to score the prompt."""
    wanted = None if body.max_tokens is None else max(1, body.max_tokens)
    sampling = sampling_within(service, body, wanted, "prompt", num_prompt_tokens)
    if not body.echo or body.logprobs is None:
        return sampling
    check_prompt_logprobs(body.logprobs, num_prompt_tokens, "logprobs")
    return msgspec.structs.replace(sampling, prompt_logprobs=max(body.logprobs, body.prompt_logprobs or 0))


def sampling_within(
    service: Service, body: GenerationRequest, wanted: int | None, param: str, num_prompt_tokens: int
) -> SamplingParams:
    """Return the sampling of up to `wanted` tokens behind a prompt. Raises as `Service.token_limit` does."""
    limit = service.token_limit(num_prompt_tokens, wanted, param)
    adapter = service.adapters.get(body.model or "", "")
    sampling = body.sampling(service.text, limit, service.sampling_defaults, adapter)
    if sampling.prompt_logprobs is not None:
        check_prompt_logprobs(sampling.prompt_logprobs, num_prompt_tokens)
    return sampling
