"""The messages of a conversation as OpenAI's API has them: text, or parts of text, pictures and clips."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, StrictStr, Tag, model_validator

from common.errors import TriptychError
from proxy.server.errors import FIRST_ERROR


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
    """`data` is base64; the format is found out from the bytes."""

    data: str
    format: str | None = None


class AudioPart(BaseModel):
    type: Literal["input_audio"]
    input_audio: InputAudio


class AudioUrl(BaseModel):
    url: str


class AudioUrlPart(BaseModel):
    """vLLM's way to name a clip: a data: or http(s): URL."""

    type: Literal["audio_url"]
    audio_url: AudioUrl


def _part_tag(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return str(kind).upper()  # capitals: left out of the field names in error messages


ContentPart = Annotated[
    Annotated[TextPart, Tag("TEXT")]
    | Annotated[ImagePart, Tag("IMAGE_URL")]
    | Annotated[AudioPart, Tag("INPUT_AUDIO")]
    | Annotated[AudioUrlPart, Tag("AUDIO_URL")],
    Discriminator(
        _part_tag,
        custom_error_type="content_part",
        custom_error_message="a content part has the type text, image_url, input_audio or audio_url",
    ),
]


def _content_tag(value: Any) -> str:
    return "PARTS" if isinstance(value, list) else "PLAIN"


Content = Annotated[
    Annotated[StrictStr | None, Tag("PLAIN")] | Annotated[list[ContentPart], FIRST_ERROR, Tag("PARTS")],
    Discriminator(_content_tag),
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
