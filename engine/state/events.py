"""What goes into and comes out of a decoder engine, apart from tensors: plain values that know no network."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from common.errors import ErrorInfo
from common.messages import FinishReason, InputLayout, Span, TokenLogprob


@dataclass(frozen=True)
class InputMetadata:
    """An offered input: what the encoder's output will be. `shape` is [num_encoder_tokens, hidden_size]."""

    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    layout: InputLayout
    content_hash: str


@dataclass(frozen=True)
class KvMetadata:
    """Keys and values of a prompt, as one engine offers them to another; fields as in `common.messages.KvOffer`."""

    num_tokens: int
    num_encoder_tokens: int
    token_shape: tuple[int, ...]
    cross_shape: tuple[int, ...]
    dtype: str
    layouts: list[InputLayout]
    seed: int
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class KvReady:
    """A prefill has every input and has begun: its keys and values can be offered.

    Of this and all that is told of a request as a whole, `attempt` is the one of `DecoderEngine.add_request`.
    """

    request_id: str
    metadata: KvMetadata
    attempt: int = 0


@dataclass(frozen=True)
class KvComputed:
    """Of a prefill, the keys and values of the first `num_tokens` tokens are there, and those of cross-attention if
    there are any."""

    request_id: str
    num_tokens: int
    attempt: int = 0


@dataclass(frozen=True)
class PrefillEnded:
    """Nothing more is wanted of a prefill; nothing of it is held, though its blocks may stay in the prefix cache."""

    request_id: str
    spans: list[Span]
    prompt_logprobs: list[TokenLogprob | None]
    attempt: int = 0


PrefillEvent: TypeAlias = KvReady | KvComputed | PrefillEnded
"""What is told of a request that was added with `prefill_only`."""


@dataclass(frozen=True)
class InputGranted:
    """Room is reserved until `lease_until_s` (by `time.monotonic`), longer where the sender gives signs of life.

    With input id KV_INPUT_ID this, as the next six, is about keys and values: those from `first_token` on are wanted,
    and no cross-attention ones with `cross_cached`; `num_parts` have come.
    """

    request_id: str
    input_id: int
    attempt: int
    lease_until_s: float
    first_token: int = 0
    cross_cached: bool = False
    num_parts: int = 0


@dataclass(frozen=True)
class InputCached:
    """The content is here already: compute nothing, send nothing."""

    request_id: str
    input_id: int
    attempt: int


@dataclass(frozen=True)
class InputRefused:
    """The input can never be taken."""

    request_id: str
    input_id: int
    attempt: int
    error: ErrorInfo


@dataclass(frozen=True)
class InputCancelled:
    """The offer's request has ended, or the offer has been replaced by a newer attempt."""

    request_id: str
    input_id: int
    attempt: int


@dataclass(frozen=True)
class InputStored:
    """The tensor, or this part of the keys and values, is in its cache."""

    request_id: str
    input_id: int
    attempt: int
    part: int = 0


@dataclass(frozen=True)
class InputRejected:
    """The tensor was not taken: its lease had ended, its request has, or it is not what was granted."""

    request_id: str
    input_id: int
    attempt: int
    reason: Literal["expired", "cancelled", "corrupt"]
    part: int = 0


@dataclass(frozen=True)
class InputLost:
    """The request needs this input (again): whoever has the media has to encode it once more.

    `attempt` is the last one that was offered. With input id KV_INPUT_ID: those of `attempt` did not come, the prompt
    has to be computed again. `request_attempt` is the one of `DecoderEngine.add_request`.
    """

    request_id: str
    input_id: int
    attempt: int = 0
    request_attempt: int = 0


@dataclass(frozen=True)
class TokensReady:
    """New tokens of sequence `index`; fields as in `common.messages.Tokens`; the request's last event has `done`."""

    request_id: str
    offset: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    num_prompt_tokens: int = 0
    spans: list[Span] = field(default_factory=list)
    index: int = 0
    done: bool = False
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    score: float | None = None
    attempt: int = 0


@dataclass(frozen=True)
class RequestFailed:
    """The request has ended with an error; nothing of it is left."""

    request_id: str
    error: ErrorInfo
    attempt: int = 0


Event: TypeAlias = (
    InputGranted
    | InputCached
    | InputRefused
    | InputCancelled
    | InputStored
    | InputRejected
    | InputLost
    | KvReady
    | KvComputed
    | PrefillEnded
    | TokensReady
    | RequestFailed
)
