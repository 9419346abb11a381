"""Requests of OpenAI's API that generate text, as typed models: messages and parts, chat, completion."""

from __future__ import annotations

import asyncio
import codecs
import functools
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictStr,
    Tag,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from common.errors import TriptychError, invalid
from common.sampling_params import MAX_LOGPROBS
from proxy.api.sampling_fields import GenerationRequest, list_tag
from proxy.api.structured import Constraint
from proxy.api.tools import ToolCall, ToolFields
from proxy.conversation.dialect import Dialect
from proxy.conversation.forced import CallList, NamedCall
from proxy.conversation.parts import Parser
from proxy.server.errors import FIRST_ERROR, from_validation, unsupported
from proxy.server.request_context import RequestContext

_TOKENS: Final = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}, "minItems": 1}
_TEXT: Final = {"type": "string", "minLength": 1}
_SEVERAL: Final = {"type": "array", "items": {"anyOf": [_TEXT, _TOKENS]}, "minItems": 1}
PromptField = Annotated[Any, WithJsonSchema({"anyOf": [_TEXT, _TOKENS, _SEVERAL, {"type": "null"}]})]
PromptOfOne = Annotated[Any, WithJsonSchema({"anyOf": [_TEXT, _TOKENS, {"type": "null"}]})]
"""Validated by hand: a list of a hundred thousand token ids is scanned once, not once per alternative."""
_OFF_LOOP_BYTES: Final = 256 * 2**10
"""Size above which bodies are parsed in a thread."""
_VALUE_BYTES: Final = 320
"""Memory of a parsed JSON value. The number of values is estimated by the commas."""
MAX_VALUES: Final = 2**20
"""Limit per body: values become objects in a single step that blocks all else. More than any context has tokens."""
MAX_MESSAGES: Final = 2**14
"""Limit per conversation on messages, and on their parts in all: each is an object of some kilobytes."""


R = TypeVar("R", bound=BaseModel)


async def parse(model: type[R], context: RequestContext) -> R:
    """Return the body of a request as `model`.

    Raises TriptychError("invalid_request") naming the wrong field, and as `RequestContext.stream` does.
    """
    body = bytearray()
    async for chunk in context.stream():
        body += chunk
    if body.startswith(codecs.BOM_UTF8):
        del body[: len(codecs.BOM_UTF8)]
    try:
        if len(body) > _OFF_LOOP_BYTES:
            num_values = await asyncio.to_thread(body.count, b",")
            if num_values > MAX_VALUES:
                message = f"the body has {num_values} commas, at most {MAX_VALUES} are allowed"
                raise TriptychError("item_too_large", message)
            context.held.reserve(_VALUE_BYTES * num_values)
            return await asyncio.to_thread(model.model_validate_json, body)
        return model.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error) from error


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class RefusalPart(BaseModel):
    """Part of an assistant's turn of another server, text here as any other."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class ImageUrl(BaseModel):
    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


def _as_object(value: object) -> object:
    """Read a bare URL, as Ollama's and older clients send it."""
    return {"url": value} if isinstance(value, str) else value


class ImagePart(BaseModel):
    type: Literal["image_url"]
    image_url: Annotated[ImageUrl, BeforeValidator(_as_object, json_schema_input_type=ImageUrl | str)]


class InputAudio(BaseModel):
    """Audio in base64; the format is recognised by the bytes."""

    data: str
    format: str | None = None


class AudioPart(BaseModel):
    type: Literal["input_audio"]
    input_audio: InputAudio


class AudioUrl(BaseModel):
    url: str


class AudioUrlPart(BaseModel):
    """vLLM's audio part: a data: or http(s): URL."""

    type: Literal["audio_url"]
    audio_url: AudioUrl


class VideoUrl(BaseModel):
    url: str


class VideoUrlPart(BaseModel):
    """vLLM's video part: a data:, http(s): or file: URL."""

    type: Literal["video_url"]
    video_url: VideoUrl


def _part_tag(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return str(kind).upper()  # capitals: left out of the field names in error messages


ContentPart = Annotated[
    Annotated[TextPart, Tag("TEXT")]
    | Annotated[RefusalPart, Tag("REFUSAL")]
    | Annotated[ImagePart, Tag("IMAGE_URL")]
    | Annotated[AudioPart, Tag("INPUT_AUDIO")]
    | Annotated[AudioUrlPart, Tag("AUDIO_URL")]
    | Annotated[VideoUrlPart, Tag("VIDEO_URL")],
    Discriminator(
        _part_tag,
        custom_error_type="content_part",
        custom_error_message="a content part has the type text, image_url, input_audio, audio_url or video_url",
    ),
]


Content = Annotated[
    Annotated[StrictStr | None, Tag("ONE")] | Annotated[list[ContentPart], FIRST_ERROR, Tag("SEVERAL")],
    Discriminator(list_tag),
]


class Message(BaseModel):
    """Turn of a conversation. Only an assistant's turn may lack `content`.

    The `name` goes to the chat template, as does an assistant's `reasoning_content` (of vLLM also `reasoning`).
    """

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], FIRST_ERROR] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    provider_specific_fields: Any = None
    """Of LiteLLM, whose answers repeat here what they have elsewhere: not looked at."""

    @model_validator(mode="after")
    def _complete(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError("content is missing")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("tool_call_id is missing: the id of the call that this is the result of")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls belong to an assistant's message")
        for name, value in (self.model_extra or {}).items():
            if value not in (None, [], {}):
                raise unsupported(f"messages.{name}", value)
        return self


class ChatRequest(ToolFields, GenerationRequest):
    """POST /v1/chat/completions.

    `language` is the spoken language, for speech models; detected by default. Their `decoder_prompt` says it, too.
    """

    messages: Annotated[list[Message], FIRST_ERROR] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1)
    language: str | None = None
    decoder_prompt: PromptOfOne = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None

    @field_validator("decoder_prompt")
    @classmethod
    def _is_one_prompt(cls, value: Any) -> Any:
        if value is None or isinstance(value, str) or _is_token_ids(value):
            return value
        raise ValueError("takes text or token ids")

    @model_validator(mode="after")
    def _check(self) -> ChatRequest:
        num_parts = sum(len(one.content) for one in self.messages if isinstance(one.content, list))
        num_parts += sum(len(one.tool_calls or ()) for one in self.messages)
        if num_parts > MAX_MESSAGES:
            raise invalid(f"the messages have {num_parts} parts, at most {MAX_MESSAGES} are allowed", "messages")
        if self.top_logprobs and not self.logprobs:
            raise invalid(f"top_logprobs is {self.top_logprobs}, which needs logprobs to be true", "top_logprobs")
        self.check_tools()
        return self

    def constraint(self) -> Constraint | None:
        """Return the constraint of the output: of calls that must come, else of the text, if any.

        A `response_format` is about text, and counts only where text may come.
        """
        forced = self.call_constraint()
        if forced is None:
            return super().constraint()
        form = None if self.response_format is not None else super().constraint()
        if form is not None:
            raise invalid(f"{form.field} cannot be used together with tool_choice, which asks for a call", form.field)
        return forced

    def call_parser(self, dialect: Dialect) -> Parser | None:
        """Return the parser of an answer's calls; None where no call can come: an answer of another form has none."""
        if not self.usable_tools:
            return None
        if self.forces_call:
            return CallList() if self.forced_name is None else NamedCall(self.forced_name)
        kind = dialect.call_parser
        if kind is None or self.constraint() is not None:
            return None
        return kind(self.schemas, single=self.parallel_tool_calls is False)

    def template_variables(self) -> dict[str, Any]:
        """Return variables for the chat template. A constrained answer does not think: its form is that of the text."""
        variables = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", self.reasoning_effort)
        if self.reasoning_effort == "none" or self.constraint() is not None:
            variables["enable_thinking"] = False
        return variables

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. A prompt is text or token ids; a list of prompts gives `n` choices each.

    For an encoder-decoder model of text, `prompt` (or `encoder_prompt`) is the encoder's prompt. `decoder_prompt`
    holds for all prompts, or is a list with an entry per prompt; the default is the model's own start.
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
            raise invalid(message, "prompt")
        if self.max_tokens == 0 and not self.echo:
            raise invalid("max_tokens must be at least 1, not 0; only echo can go without new tokens", "max_tokens")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @functools.cached_property
    def prompts(self) -> list[str | list[int]]:
        """Prompts as a list. A list of integers is a single prompt."""
        return as_prompts(self.prompt if self.encoder_prompt is None else self.encoder_prompt)


Prompt = str | list[int]


def as_prompts(value: Any) -> list[str | list[int]]:
    """Return a list of prompts for a prompt or a list."""
    return [value] if isinstance(value, str) or _is_token_ids(value) else value


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)
