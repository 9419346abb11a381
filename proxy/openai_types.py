"""The requests of OpenAI's API that we take, as typed models.

What we do not support is refused by name rather than ignored: a client that asks for `n=2` must not get one answer.
Fields that change nothing about the answer (`user`, `metadata`, ...) are accepted, and so are unsupported fields with
the value that means "off".
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StrictStr,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from common.errors import TriptychError
from common.sampling_params import SamplingParams
from proxy.errors import from_validation
from proxy.exchange import Exchange

_IGNORED: Final = frozenset(
    [
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
    ]
)
"""They say nothing about the answer itself."""
_OFF: Final[dict[str, tuple[Any, ...]]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "prompt_logprobs": (None, 0),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
    "use_beam_search": (None, False),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "add_special_tokens": (None, False),
}
"""Unsupported fields and the values that mean that they are not used."""
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""What fits the wire: bigger integers are refused here, where the field can be named."""
_OFF_LOOP_BYTES: Final = 256 * 2**10
"""Bodies above this are parsed in a thread."""


R = TypeVar("R", bound=BaseModel)


async def parse(model: type[R], exchange: Exchange) -> R:
    """The body of a request as `model`. Raises TriptychError("invalid_request") naming the field that is wrong."""
    body = await exchange.body()
    try:
        if len(body) > _OFF_LOOP_BYTES:
            return await asyncio.to_thread(model.model_validate_json, body)
        return model.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error) from error


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False


class GenerationRequest(BaseModel):
    """What chat and text completion share.

    `return_token_ids` is vLLM's extension: every choice, or every choice of a streamed chunk, has its generated tokens
    in `token_ids`, the end of sequence or other token that stopped it included.
    """

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=2**31)]] | None = Field(None, max_length=64)
    ignore_eos: bool = False
    return_token_ids: bool = False

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> GenerationRequest:
        for name, value in (self.model_extra or {}).items():
            if name in _IGNORED:
                continue
            if name not in _OFF:
                raise TriptychError("invalid_request", f"{name} is not a known field", name)
            if not any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in _OFF[name]):
                raise TriptychError("invalid_request", f"{name} is not supported, {value!r:.80} was given", name)
        return self

    def sampling(self, max_tokens: int, default_temperature: float = 1.0) -> SamplingParams:
        """The sampling of this request, for at most `max_tokens` tokens."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=default_temperature if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            seed=self.seed,
            stop=self.stop_strings,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
        ).validate()

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def told(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """The field of a choice that tells its tokens, if they were asked for."""
        return {"token_ids": list(token_ids)} if self.return_token_ids else {}

    @property
    def wants_usage_event(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class ImageUrl(BaseModel):
    url: str
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(BaseModel):
    type: Literal["image_url"]
    image_url: ImageUrl


class InputAudio(BaseModel):
    data: str
    format: str | None = None


class AudioPart(BaseModel):
    type: Literal["input_audio"]
    input_audio: InputAudio


def _part_tag(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return str(kind).upper()  # capitals: left out of the field names in error messages


ContentPart = Annotated[
    Annotated[TextPart, Tag("TEXT")]
    | Annotated[ImagePart, Tag("IMAGE_URL")]
    | Annotated[AudioPart, Tag("INPUT_AUDIO")],
    Discriminator(
        _part_tag,
        custom_error_type="content_part",
        custom_error_message="a content part has the type text, image_url or input_audio",
    ),
]


def _content_tag(value: Any) -> str:
    return "PARTS" if isinstance(value, list) else "PLAIN"


Content = Annotated[
    Annotated[StrictStr | None, Tag("PLAIN")] | Annotated[list[ContentPart], Tag("PARTS")], Discriminator(_content_tag)
]


class Message(BaseModel):
    """One turn. `content` may be missing on an assistant's turn only."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant"]
    content: Content = None
    name: str | None = None

    @model_validator(mode="after")
    def _complete(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError("content is missing")
        for name, value in (self.model_extra or {}).items():
            if value not in (None, [], {}):
                raise TriptychError("invalid_request", f"{name} in a message is not supported", f"messages.{name}")
        return self


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions. `language` is for speech models: what is spoken, detected if not given."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    language: str | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. A prompt is text or token ids; a list of prompts gives one choice each."""

    prompt: Any

    @field_validator("prompt")
    @classmethod
    def _is_text_or_tokens(cls, value: Any) -> Any:
        entries = value if isinstance(value, list) and value and not _is_token_ids(value) else [value]
        if all(isinstance(entry, str) or _is_token_ids(entry) for entry in entries):
            return value
        raise ValueError("takes text, token ids, or a list of either")

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or several. A list of integers is one prompt."""
        return [self.prompt] if isinstance(self.prompt, str) or _is_token_ids(self.prompt) else self.prompt


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)
