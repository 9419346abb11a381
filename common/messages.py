"""All messages between processes, typed and validated. The wire is MessagePack, without any pickle.

Two conversations use them:

    proxy  <- ZMQ ->   workers     Generate, Encode, StopSequence, Abort, Heartbeat
                                   Tokens, Encoded, Prefilled, InputNeeded, Failed
    sender <- Redis -> receiver    Offer or KvOffer -> Grant -> (tensors by a transport) -> Receipt; or Withdraw

`encode` and `decode_*` are the only way on and off the wire. Times are Unix seconds, sizes bytes. A deadline is by the
holder's `time.monotonic`. On the wire a deadline is the seconds left (as in gRPC), because the clocks of two hosts need
not agree; the time of the transfer is added.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar, get_args

import msgspec

from common.errors import ErrorInfo, invalid
from common.families import MediaKind as MediaKind
from common.sampling_params import SamplingParams

PROTOCOL_VERSION: Final = 14
MAX_CONTROL_BYTES: Final = 16 * 2**20
"""Cap of a message without media."""
MAX_MEDIA_BYTES: Final = 64 * 2**20
"""Cap of one media item on the wire."""
SAMPLING_RATES: Final = (1_000, 400_000)
"""Lowest and highest sampling rate of audio, in Hz: the header of a file could claim any number."""
MAX_CHANNELS: Final = 8

KV_INPUT_ID: Final = 1_000_000
"""Input id of the KV of a request: no request has as many media items."""

REPEAT_S: Final = 2.0
"""Pause after which an unanswered offer is sent again: Redis may have lost the offer, or the answer."""

WorkerRole = Literal["encoder", "prefill", "decode", "prefill_decode", "encode_prefill_decode"]
Role = Literal[WorkerRole, "proxy"]
WORKER_ROLES: Final[tuple[WorkerRole, ...]] = get_args(WorkerRole)
FinishReason = Literal["stop", "length"]
Id = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
"""A number or an index; sums and differences of two counts fit 64 bits."""
Shape = Annotated[list[Count], msgspec.Meta(max_length=8)]
Digest = Annotated[int, msgspec.Meta(ge=0)]
Finite = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Seconds = Finite
"""A finite time: a timer set to infinity or NaN would upset all other timers."""


class Span(msgspec.Struct, frozen=True):
    """A stage of a request on an instance: a bar of the timeline."""

    stage: str
    instance: str
    start_s: Seconds
    end_s: Seconds


class InputSlot(msgspec.Struct, frozen=True):
    """A media item as seen by the prompt, before the size is known.

    `prompt_index` is the place of the single placeholder token in `prompt_token_ids`; None for an encoder-decoder
    model, where the decoder reads the input by cross-attention.
    """

    input_id: Count
    kind: MediaKind
    content_hash: Id
    prompt_index: int | None = None


# --- proxy -> worker


class Resumed(msgspec.Struct, frozen=True):
    """A sequence of a request begun by another instance: the number, and the tokens generated there."""

    index: Count
    token_ids: list[Count]


class Generate(msgspec.Struct, frozen=True, tag="generate"):
    """A request for a worker with a decoder. The inputs arrive separately, by handoff.

    Lower `priority` goes first. With `resumed`, only these sequences are generated, after their known tokens: offsets,
    limits, penalties and random draws go on as if the request had never moved.

    Where prefill and decode are apart, each worker gets a message. With `prefill_for`, an instance id, the receiver
    samples nothing; the KV of the prompt goes to that instance. With `prefilled`, the KV will come by handoff.

    `attempt` counts the attempts of the request on all workers. On a worker a newer attempt replaces an older attempt,
    and replies carry the number. The instance `prefill_for` has the request in attempt `prefill_for_attempt`.
    """

    request_id: Id
    prompt_token_ids: list[Count]
    inputs: list[InputSlot]
    sampling: SamplingParams
    priority: int = 0
    resumed: list[Resumed] = []
    prefill_for: str = ""
    prefilled: bool = False
    attempt: Count = 0
    prefill_for_attempt: Count = 0


class Encode(msgspec.Struct, frozen=True, tag="encode"):
    """A media item for an encoder. The output goes to instance `destination`, in attempt `request_attempt` of the
    request; `attempt` counts the item's own attempts."""

    request_id: Id
    input_id: Count
    attempt: Count
    kind: MediaKind
    content_hash: Id
    media: bytes
    destination: Id
    deadline_s: Seconds
    request_attempt: Count = 0


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Forget the request and free all its memory. Unknown ids are fine: the request may have ended already."""

    request_id: Id


class StopSequence(msgspec.Struct, frozen=True, tag="stop_sequence"):
    """Stop a sequence of a request after a stop string; the other sequences go on.

    No reply follows. Unknown requests and sequences are fine: both may have ended already.
    """

    request_id: Id
    index: Count


class Inquiry(msgspec.Struct, frozen=True, tag="inquiry"):
    """Ask a worker for an attempt of a request. A worker that still has the attempt stays silent, any other sends
    `Failed`.

    The inquiry follows the request on the same connection, and the answer follows the last reply about the request.
    """

    request_id: Id
    attempt: Count


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """A sign of life, sent by a proxy once a second. A worker frees the requests of a proxy after too long a silence.

    Workers send heartbeats as well: after a failed send the proxy counts as gone.
    """


# --- worker -> proxy


class TokenLogprob(msgspec.Struct, frozen=True):
    """Log-probability of a token: natural logarithm, taken before the temperature and before any other change.

    `rank` counts from 1, the likeliest token; `top` are the likeliest tokens with log-probabilities, likeliest first.
    `frame` is the encoder's frame at which a token of the prompt begins, where `SamplingParams.alignment` asks for it.
    """

    token_id: Count
    logprob: float
    rank: Count
    top: list[tuple[int, float]] = []
    frame: Count | None = None


class Tokens(msgspec.Struct, frozen=True, tag="tokens"):
    """The next tokens of sequence `index` of a request; a sequence's last message carries `finish_reason`.

    `offset` is the number of earlier tokens of the sequence, by which a repeated message is recognised. Every message
    has the prompt's true length and its cached part; the last message of the request has `done` and the spans.
    `logprobs`, if requested, has an entry per token. `prompt_logprobs` comes with the first message only, None for the
    prompt's first token and for tokens of media. Beams come as a whole at the end, best first, with `score`. `attempt`
    is from Generate.
    """

    request_id: Id
    offset: Count
    token_ids: list[Count]
    finish_reason: FinishReason | None = None
    num_prompt_tokens: Count = 0
    spans: list[Span] = []
    index: Count = 0
    done: bool = False
    num_cached_tokens: Count = 0
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[TokenLogprob | None] = []
    score: float | None = None
    attempt: Count = 0


class Encoded(msgspec.Struct, frozen=True, tag="encoded"):
    """The encoder's reply, without the output: the input is in place (`error` is None), or the reason of the failure.

    `undelivered`: the output was on the way to the destination for most of the attempt. Another encoder may have a
    working route.
    """

    request_id: Id
    input_id: Count
    attempt: Count
    error: ErrorInfo | None = None
    spans: list[Span] = []
    undelivered: bool = False


class Prefilled(msgspec.Struct, frozen=True, tag="prefilled"):
    """The end of a prefill: the KV is in place on the decode instance (`error` is None), or the reason of the failure.

    `prompt_logprobs` as in Tokens, if requested: the decode instance cannot compute them.
    """

    request_id: Id
    attempt: Count
    error: ErrorInfo | None = None
    spans: list[Span] = []
    prompt_logprobs: list[TokenLogprob | None] = []


class InputNeeded(msgspec.Struct, frozen=True, tag="input_needed"):
    """Ask the proxy for an input (again): the lease ran out, or the memory was taken back. The proxy sends another
    Encode, unless an item newer than `attempt`, the last attempt known to the worker, is under way.

    With KV_INPUT_ID as `input_id`, the KV of `attempt` did not come: the proxy has the prompt computed again.
    `request_attempt` is from Generate.
    """

    request_id: Id
    input_id: Count
    attempt: Count = 0
    request_attempt: Count = 0


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The request has ended with an error, and the worker has freed all its memory. `attempt` is from Generate."""

    request_id: Id
    error: ErrorInfo
    attempt: Count = 0


# --- the handoff: sender <-> receiver, by the four channels


class InputLayout(msgspec.Struct, frozen=True):
    """Layout of an input in the prompt and in memory, known after preprocessing and before encoding.

    `num_encoder_tokens` rows come out of the encoder; `expansion` (runs of token id, count) replaces the placeholder
    token in the prompt. The two counts are separate facts: a model may put separator tokens into the expansion.
    `grid` is the (time, height, width) patch grid after merging of each run of placeholders, for models with 3-D rotary
    positions; `times` are the positions in time, 0, 1, 2 and so on for None. `continues`: positions count from the
    begin of the input before, of the same height and width. The text after the input sees the first
    `num_visible_tokens` rows, or all for None.
    """

    num_encoder_tokens: Count
    expansion: list[tuple[int, int]]
    grid: tuple[int, int, int] | None = None
    num_visible_tokens: Count | None = None
    times: list[Count] | None = None
    continues: bool = False


class Offer(msgspec.Struct, frozen=True, tag="offer"):
    """Channel `metadata`, sender to receiver: announcement of an encoder output, sent before any computation.

    The output is for attempt `request_attempt` of the request at the receiver only.
    """

    request_id: Id
    input_id: Count
    attempt: Count
    content_hash: Id
    kind: MediaKind
    shape: Shape
    dtype: str
    size_bytes: Count
    layout: InputLayout
    sender: Id
    deadline_s: Seconds
    request_attempt: Count = 0


class KvOffer(msgspec.Struct, frozen=True, tag="kv_offer"):
    """Channel `metadata`, prefill to decode: announcement of a prompt's KV, sent once only the computation is left.

    The KV of self-attention covers the first `num_tokens` tokens; the receiver computes the last known token, and
    samples from the logits. Tensors have the shape [num_tokens of the part, *token_shape], and for cross-attention
    [num_encoder_tokens of the part, *cross_shape]; both end in [layers, 2 (key, value), num_kv_heads, head_dim]. Blocks
    do not appear: each side has other blocks. `layouts` are of the request's inputs, in order; `seed` is the sender's.
    The KV is for attempt `request_attempt` of the request at the receiver only.
    """

    request_id: Id
    attempt: Count
    num_tokens: Count
    num_encoder_tokens: Count
    token_shape: Shape
    cross_shape: Shape
    dtype: str
    layouts: list[InputLayout]
    seed: int
    num_cached_tokens: Count
    sender: Id
    deadline_s: Seconds
    request_attempt: Count = 0

    @property
    def input_id(self) -> int:
        return KV_INPUT_ID


class Withdraw(msgspec.Struct, frozen=True, tag="withdraw"):
    """Channel `metadata`, after an Offer or KvOffer: the sender takes the offer back. No answer follows.

    After the loss of this message, the receiver's reservation ends by the lease.
    """

    request_id: Id
    input_id: Count
    attempt: Count
    sender: Id


class Grant(msgspec.Struct, frozen=True, tag="grant"):
    """Channel `allocated`, receiver to sender.

    granted: memory is reserved; cached: the content is here already, send nothing;
    refused: never possible, with the reason in `error`; cancelled: the request is gone.
    Of KV, only tokens from `first_token` on are wanted, and no cross-attention with `cross_cached`; the first
    `num_parts` parts are here by now.
    """

    request_id: Id
    input_id: Count
    attempt: Count
    status: Literal["granted", "cached", "refused", "cancelled"]
    error: ErrorInfo | None = None
    first_token: Count = 0
    cross_cached: bool = False
    num_parts: Count = 0


class TensorHeader(msgspec.Struct, frozen=True, tag="tensor"):
    """Channel `tensor`: the frame before the raw bytes. The header must agree with the grant.

    `checksum` is of the bytes (`common.hashing.checksum`). KV comes in parts, numbered from 0: `table` names the
    attention, `first` is the first token of the part.
    """

    request_id: Id
    input_id: Count
    attempt: Count
    sender: Id
    receiver_epoch: int
    shape: Shape
    dtype: str
    size_bytes: Count
    checksum: Digest = 0
    part: Count = 0
    table: Literal["", "self", "cross"] = ""
    first: Count = 0


class Receipt(msgspec.Struct, frozen=True, tag="receipt"):
    """Channel `injected`, receiver to sender: part `part` is in the cache, or the reason of the failure.

    After `corrupt` the sender repeats the part; the grant still stands.
    """

    request_id: Id
    input_id: Count
    attempt: Count
    status: Literal["stored", "expired", "cancelled", "corrupt"]
    part: Count = 0


# --- who is alive


class InstanceRecord(msgspec.Struct, frozen=True):
    """An instance's own entry in the registry. `epoch` is new at every start.

    Instances work together only when `fingerprint` (configuration and weights), `dtype` and `protocol` are equal.
    `tensor_address` has an address per receiving transport, in a single string. A `draining` worker accepts nothing new
    and then ends, or comes back with `next_role`; a proxy is not ready, and ends by a signal. `encodes`: the instance
    can encode inputs for its own requests. `key_id` names the cluster key, empty for none. `figures` are some of a
    worker's metrics by name, as of its last heartbeat: what the proxy shows of the cluster without asking the worker.
    """

    instance_id: Id
    role: Role
    epoch: int
    model: str
    fingerprint: str
    dtype: str
    http_address: str
    requests_address: str
    tensor_address: str = ""
    protocol: int = PROTOCOL_VERSION
    outstanding: int = 0
    outstanding_tokens: int = 0
    draining: bool = False
    next_role: Role | None = None
    encodes: bool = False
    key_id: str = ""
    figures: dict[str, Finite] = {}

    @property
    def base_url(self) -> str:
        """URL of the HTTP server; a proxy's entry has its address without a scheme."""
        return self.http_address if "://" in self.http_address else f"http://{self.http_address}"


class Placed(msgspec.Struct, frozen=True):
    """A prompt that a proxy has placed, told to the cluster's other proxies: `keys` are those of the caches, `computed`
    and `decoded` the instances, `decoded` empty where one instance does both."""

    proxy: Id
    keys: list[bytes]
    computed: Id
    decoded: str = ""


ToWorker: TypeAlias = Generate | Encode | StopSequence | Abort | Inquiry | Heartbeat
FromWorker: TypeAlias = Tokens | Encoded | Prefilled | InputNeeded | Failed
"""Replies of a worker about a request. The wire carries heartbeats beside these."""
HandoffMessage: TypeAlias = Offer | KvOffer | Withdraw | Grant | Receipt

T = TypeVar("T")
Decode: TypeAlias = Callable[[bytes | memoryview], T]

_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """Return the wire form of a message."""
    return _encoder.encode(_with_deadline(message, -time.monotonic()))


def _with_deadline(message: T, by_s: float) -> T:
    """Return the message with any deadline `by_s` later."""
    if not isinstance(message, Encode | Offer | KvOffer):
        return message
    return msgspec.structs.replace(message, deadline_s=message.deadline_s + by_s)


def make_decode(kind: type[T] | Any) -> Decode[T]:
    """Return a decoder of messages of `kind`, a type or a union. The decoder raises ValueError on any other input."""
    decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)

    def decode(data: bytes | memoryview) -> T:
        try:
            return decoder.decode(data)
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:  # ValueError: no text
            raise ValueError(f"not a valid message: {error!s:.500}") from error

    return decode


def _make_capped(kind: type[T] | Any, cap: int = MAX_CONTROL_BYTES) -> Decode[T]:
    """Return a decoder of messages of `kind` with deadlines. The decoder raises TriptychError("invalid_request") on any
    other bytes, and on more than `cap`."""
    decode: Decode[T] = make_decode(kind)

    def decode_capped(data: bytes | memoryview) -> T:
        if len(data) > cap:
            raise invalid(f"a message of {len(data)} bytes is over the cap of {cap}")
        try:
            return _with_deadline(decode(data), time.monotonic())
        except ValueError as error:
            raise invalid(str(error)) from error

    return decode_capped


decode_to_worker: Final[Decode[ToWorker]] = _make_capped(ToWorker, MAX_MEDIA_BYTES + MAX_CONTROL_BYTES)
decode_from_worker: Final[Decode[FromWorker | Heartbeat]] = _make_capped(FromWorker | Heartbeat)
decode_handoff: Final[Decode[HandoffMessage]] = _make_capped(HandoffMessage)
decode_record: Final[Decode[InstanceRecord]] = _make_capped(InstanceRecord, 64 * 2**10)
decode_placed: Final[Decode[Placed]] = _make_capped(Placed)
