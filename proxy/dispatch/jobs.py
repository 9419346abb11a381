"""A request for the cluster, after HTTP and before the wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from common.hashing import content_hash
from common.messages import InputSlot, MediaKind
from common.sampling_params import SamplingParams


@dataclass(frozen=True)
class MediaItem:
    """An image or audio input. `param` is the field of the request, for error messages."""

    kind: MediaKind
    data: bytes = field(repr=False)
    content_hash: str
    param: str

    @classmethod
    def of(cls, kind: MediaKind, data: bytes, param: str) -> MediaItem:
        return cls(kind, data, content_hash(kind, data), param)


@dataclass(frozen=True)
class Job:
    """Input of a generation: a prompt with one placeholder per media item, the items, the sampling.

    `request_id` is the id on the wire: the response's own, or by `part_id` where a response needs several jobs.
    `fields` maps settings to differently named fields of the request, for error messages. `enough` holds the sequences
    that ended here, for example by a stop string; the reader of the tokens fills it.
    `num_encoder_prompt_tokens` are the tokens of a prompt for the encoder, which count as prompt, too.
    """

    request_id: str
    prompt_token_ids: list[int] = field(repr=False)
    sampling: SamplingParams
    slots: list[InputSlot] = field(default_factory=list)
    media: list[MediaItem] = field(default_factory=list)
    priority: int = 0
    fields: Mapping[str, str] = field(default_factory=dict)
    enough: set[int] = field(default_factory=set)
    num_encoder_prompt_tokens: int = 0

    def field_of(self, param: str | None) -> str | None:
        """Return the request's field for a setting in a worker's error."""
        return None if param is None else self.fields.get(param, param)


def part_id(response_id: str, part: int) -> str:
    """Return the id of a response's job, where the response has several."""
    return f"{response_id}.{part}"


def response_id(request_id: str) -> str:
    """Return the id of a job's response."""
    return request_id.partition(".")[0]


def make_slots(media: list[MediaItem], prompt_indices: list[int] | None) -> list[InputSlot]:
    """Return input slots in order; `prompt_indices` are the placeholders, None for a prompt without any."""
    return [
        InputSlot(index, item.kind, item.content_hash, None if prompt_indices is None else prompt_indices[index])
        for index, item in enumerate(media)
    ]
