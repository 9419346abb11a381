"""The requests of OpenAI's API that generate text, as typed models."""

from __future__ import annotations

import asyncio
import functools
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, Field, ValidationError, WithJsonSchema, field_validator, model_validator

from common.errors import TriptychError
from common.sampling_params import MAX_LOGPROBS
from proxy.api.messages import Message
from proxy.api.sampling_fields import GenerationRequest
from proxy.server.errors import FIRST_ERROR, from_validation
from proxy.server.request_context import RequestContext

_TOKENS: Final = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}, "minItems": 1}
_TEXT: Final = {"type": "string", "minLength": 1}
_SEVERAL: Final = {"type": "array", "items": {"anyOf": [_TEXT, _TOKENS]}, "minItems": 1}
PromptField = Annotated[Any, WithJsonSchema({"anyOf": [_TEXT, _TOKENS, _SEVERAL, {"type": "null"}]})]
"""Checked by hand: a list of a hundred thousand token ids is looked at once, not once for every alternative."""
_OFF_LOOP_BYTES: Final = 256 * 2**10
"""Bodies above this are parsed in a thread."""
_VALUE_BYTES: Final = 320
"""What a value of JSON may become: two characters of a list are an object of Python's. There are as many as commas."""
MAX_VALUES: Final = 2**20
"""Of one body: they become objects in one go, in which nothing else runs. More token ids than any context has."""
MAX_MESSAGES: Final = 2**14
"""Of one conversation, and so many parts of them together: each is an object of some kilobytes, whatever it says."""


R = TypeVar("R", bound=BaseModel)


async def parse(model: type[R], exchange: RequestContext) -> R:
    """The body of a request as `model`. Raises TriptychError("invalid_request") naming the field that is wrong, and as
    `RequestContext.body` does."""
    body = await exchange.body()
    try:
        if len(body) > _OFF_LOOP_BYTES:
            num_values = await asyncio.to_thread(body.count, b",")
            if num_values > MAX_VALUES:
                message = f"the body has {num_values} commas, at most {MAX_VALUES} are allowed"
                raise TriptychError("item_too_large", message)
            exchange.held.reserve(_VALUE_BYTES * num_values)
            return await asyncio.to_thread(model.model_validate_json, body)
        return model.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error) from error


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions. `language` is for speech models: what is spoken, detected if not given."""

    messages: Annotated[list[Message], FIRST_ERROR] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1)
    language: str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _has_not_too_many_parts(self) -> ChatRequest:
        num_parts = sum(len(one.content) for one in self.messages if isinstance(one.content, list))
        if num_parts > MAX_MESSAGES:
            message = f"the messages have {num_parts} parts, at most {MAX_MESSAGES} are allowed"
            raise TriptychError("invalid_request", message, "messages")
        return self

    @model_validator(mode="after")
    def _top_logprobs_are_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            message = f"top_logprobs is {self.top_logprobs}, which needs logprobs to be true"
            raise TriptychError("invalid_request", message, "top_logprobs")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. A prompt is text or token ids; a list of prompts gives `n` choices each.

    For an encoder-decoder model of text it is the encoder's prompt, also under the name `encoder_prompt`; the decoder's
    is `decoder_prompt`, one for all of them or one each, by default what the model begins with.
    """

    prompt: PromptField = None
    encoder_prompt: PromptField = None
    decoder_prompt: PromptField = None
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    add_special_tokens: bool | None = None

    @field_validator("logprobs", mode="before")
    @classmethod
    def _logprobs_are_a_number(cls, value: Any) -> Any:
        if value is True:
            raise ValueError("takes a number of tokens here, as in OpenAI's API")
        return None if value is False else value

    @field_validator("prompt", "encoder_prompt", "decoder_prompt")
    @classmethod
    def _is_text_or_tokens(cls, value: Any) -> Any:
        entries = value if isinstance(value, list) and value and not _is_token_ids(value) else [value]
        if value is None or all(isinstance(entry, str) or _is_token_ids(entry) for entry in entries):
            return value
        raise ValueError("takes text, token ids, or a list of either")

    @model_validator(mode="after")
    def _has_one_prompt(self) -> CompletionRequest:
        if (self.prompt is None) == (self.encoder_prompt is None):
            message = "prompt is missing" if self.prompt is None else "prompt and encoder_prompt are the same: give one"
            raise TriptychError("invalid_request", message, "prompt")
        if self.max_tokens == 0 and not self.echo:
            message = "max_tokens must be at least 1, not 0; only echo can go without new tokens"
            raise TriptychError("invalid_request", message, "max_tokens")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @functools.cached_property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or several. A list of integers is one prompt."""
        return as_prompts(self.prompt if self.encoder_prompt is None else self.encoder_prompt)

    @property
    def decoder_prompts(self) -> list[str | list[int]] | None:
        return None if self.decoder_prompt is None else as_prompts(self.decoder_prompt)


Prompt = str | list[int]


def as_prompts(value: Any) -> list[str | list[int]]:
    """One prompt or several, as several."""
    return [value] if isinstance(value, str) or _is_token_ids(value) else value


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)
