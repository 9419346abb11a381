"""POST /tokenize and /detokenize: text or a conversation as token ids, and token ids as text, with vLLM's bodies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.errors import invalid
from proxy.api.chat import collect_media, make_prompt
from proxy.api.openai_types import MAX_MESSAGES, ChatRequest, Message, parse
from proxy.api.sampling_fields import TokenId
from proxy.server.errors import FIRST_ERROR, from_validation
from proxy.server.request_context import Payload, RequestContext
from proxy.service import Service


class TokenizeRequest(BaseModel):
    """A `prompt`, or `messages` for the chat template, in which each media item is one token.

    With `return_token_strs` the answer has the text of each token as the vocabulary writes it.
    """

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], FIRST_ERROR] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Any = None
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    """Token ids; the answer has their text in `prompt`, special tokens included."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    tokens: Annotated[list[TokenId], FIRST_ERROR]


async def tokenize(service: Service, context: RequestContext) -> AsyncGenerator[Payload]:
    """Answer with the token ids of a text or a conversation."""
    body = await parse(TokenizeRequest, context)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("give either prompt or messages", "prompt")
    tokens = await asyncio.to_thread(_encode, service, body)
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": service.max_model_len, "tokens": tokens}
    if body.return_token_strs:
        answer["token_strs"] = [service.text.tokenizer.id_to_token(token) for token in tokens]
    yield JSONResponse(answer)


async def detokenize(service: Service, context: RequestContext) -> AsyncGenerator[Payload]:
    """Answer with the text of token ids."""
    body = await parse(DetokenizeRequest, context)
    service.check_model(body.model)
    if (largest := max(body.tokens, default=0)) >= service.info.vocab_size:
        raise invalid(f"token id {largest} is not in the vocabulary of {service.info.vocab_size}", "tokens")
    decode = service.text.tokenizer.decode_batch  # other threads run meanwhile, as they do not in `decode`
    (text,) = await asyncio.to_thread(decode, [body.tokens], skip_special_tokens=False)
    yield JSONResponse({"prompt": text})


def _encode(service: Service, body: TokenizeRequest) -> list[int]:
    if body.messages is None:
        special = body.add_special_tokens is not False
        return service.text.encode_prompt(body.prompt or "", "prompt", add_special_tokens=special)
    collect_media(body.messages, service.info.media_kinds, service.model_name)
    try:
        # Of the fields of both, `add_special_tokens` is refused where it would change the template's text.
        chat = ChatRequest(**{name: value for name, value in body if name not in ("prompt", "return_token_strs")})
    except ValidationError as error:
        raise from_validation(error) from error
    return make_prompt(service.text, service.dialect, chat)[0]
