"""A request for the cluster, after HTTP and before the wire."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from common.errors import ErrorInfo, TriptychError
from common.hashing import content_hash
from common.messages import Generate, InputSlot, MediaKind, Resumed
from common.sampling_params import SamplingParams

CHUNK_TOKENS: Final = 64
MAX_CHUNKS: Final = 256
"""Of one prompt; longer prompts are compared by the first 16,384 tokens."""


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
    `field_of` returns the request's field for a setting, for error messages. `enough` holds the sequences that ended
    here, for example by a stop string; the reader of the tokens fills it.
    `num_encoder_prompt_tokens` are those of a text or a window of sound for the encoder, which count as prompt, too.
    """

    request_id: str
    prompt_token_ids: list[int] = field(repr=False)
    sampling: SamplingParams
    slots: list[InputSlot] = field(default_factory=list)
    media: list[MediaItem] = field(default_factory=list)
    priority: int = 0
    field_of: Callable[[str], str] = str
    enough: set[int] = field(default_factory=set)
    num_encoder_prompt_tokens: int = 0

    def message(self, resumed: list[Resumed], **part: Any) -> Generate:
        """Return the message for a worker. `part` are the fields in which the workers of a job differ."""
        prompt, sampling = self.prompt_token_ids, self.sampling
        return Generate(self.request_id, prompt, self.slots, sampling, self.priority, resumed, **part)

    def error_of(self, error: ErrorInfo) -> TriptychError:
        """Return a worker's error, with the request's field for the setting."""
        return TriptychError(error.code, error.message, None if error.param is None else self.field_of(error.param))


def part_id(response_id: str, part: int) -> str:
    """Return the id of a response's job, where the response has several."""
    return f"{response_id}.{part}"


def make_slots(media: list[MediaItem], prompt_indices: list[int] | None) -> list[InputSlot]:
    """Return input slots in order; `prompt_indices` are the placeholders, None for a prompt without any."""
    return [
        InputSlot(index, item.kind, item.content_hash, None if prompt_indices is None else prompt_indices[index])
        for index, item in enumerate(media)
    ]


def cache_keys(job: Job) -> list[bytes]:
    """Return the cache keys of an instance after this job, the longest prefix first.

    For CHUNK_TOKENS = 64 and an image among tokens 64 to 127:

        tokens   0 ........ 63 | 64 ... image ... 127 | 128 ...
        keys     |--- k1 ----|                                     prompts with equal beginnings share k1, ...
                 |----------------- k2 ---------------|            ... and k2 only with the same image
        list     [k2, k1, image]

    With cross-attention a decoder's blocks depend on the inputs: inputs outside the prompt begin every chain. So does
    the adapter, which is a key of its own as well.
    """
    in_prompt = {one.prompt_index: one.content_hash for one in job.slots if one.prompt_index is not None}
    adapter = [job.sampling.adapter] if job.sampling.adapter else []
    chain = "".join([*adapter, *(one.content_hash for one in job.slots if one.prompt_index is None)]).encode()
    prefixes: list[bytes] = []
    tokens = job.prompt_token_ids
    for start in range(0, min(len(tokens) - CHUNK_TOKENS + 1, MAX_CHUNKS * CHUNK_TOKENS), CHUNK_TOKENS):
        digest = hashlib.blake2b(chain, digest_size=16)
        digest.update(array("q", tokens[start : start + CHUNK_TOKENS]).tobytes())
        for index in sorted(in_prompt.keys() & range(start, start + CHUNK_TOKENS)):
            digest.update(in_prompt[index].encode())
        chain = digest.digest()
        prefixes.append(chain)
    return [*reversed(prefixes), *(one.content_hash.encode() for one in job.slots), *map(str.encode, adapter)]
