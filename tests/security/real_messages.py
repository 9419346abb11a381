"""One real message of every kind, as it is on the wire."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common.errors import ErrorInfo
from common.messages import (
    KV_INPUT_ID,
    Abort,
    Encode,
    Encoded,
    Failed,
    Generate,
    Grant,
    Heartbeat,
    InputLayout,
    InputNeeded,
    InputSlot,
    Inquiry,
    InstanceRecord,
    KvOffer,
    Offer,
    Prefilled,
    Receipt,
    Resumed,
    Span,
    StopSequence,
    TensorHeader,
    TokenLogprob,
    Tokens,
    Withdraw,
    decode_from_worker,
    decode_handoff,
    decode_record,
    decode_to_worker,
    encode,
)
from common.sampling_params import Grammar, SamplingParams

NOW_S = 1_800_000_000.0
LAYOUT = InputLayout(64, [(7, 1), (8, 64), (9, 1)], (1, 8, 8), 64)
SAMPLING = SamplingParams(
    temperature=0.7, seed=3, stop=("end",), logit_bias={5: -1.5}, grammar=Grammar("regex", "a+"), logprobs=2
)
SPANS = [Span("prefill", "pd0", NOW_S, NOW_S + 1)]
LOGPROB = TokenLogprob(5, -0.5, 1, [(5, -0.5), (6, -1.5)])

MESSAGES: dict[Callable[[bytes], Any], list[Any]] = {
    decode_to_worker: [
        Generate("r", list(range(40)), [InputSlot(0, "image", "h", 3)], SAMPLING, resumed=[Resumed(0, [5, 6])]),
        Encode("r", 0, 1, "image", "h", b"\x89PNG" + bytes(200), "pd0", NOW_S),
        StopSequence("r", 1),
        Abort("r"),
        Inquiry("r", 1),
        Heartbeat(),
    ],
    decode_from_worker: [
        Tokens("r", 3, [5, 6], "stop", 40, SPANS, 0, True, 16, [LOGPROB], [None, LOGPROB], -1.5),
        Encoded("r", 0, 1, ErrorInfo("bad_media", "no picture", "messages"), SPANS),
        Prefilled("r", 1, None, SPANS, [None, LOGPROB]),
        InputNeeded("r", KV_INPUT_ID),
        Failed("r", ErrorInfo("overloaded", "later")),
    ],
    decode_handoff: [
        Offer("r", 0, 1, "h", "image", [64, 192], "float32", 49152, LAYOUT, "e0", NOW_S),
        KvOffer("r", 1, 40, 0, [12, 2, 3, 64], [12, 2, 3, 64], "bfloat16", [LAYOUT], 3, 16, "p0", NOW_S),
        Grant("r", 0, 1, "granted"),
        Receipt("r", 0, 1, "stored", 2),
        Withdraw("r", 0, 1, "e0"),
    ],
    decode_record: [InstanceRecord("e0", "encoder", 7, "signpost", "f00d", "float32", "http://x:1", "tcp://x:2")],
}
HEADER = TensorHeader("r", 0, 1, "e0", 7, [64, 192], "float32", 49152, 2**63, 1, "self", 16)
WIRE = {decode: [encode(message) for message in messages] for decode, messages in MESSAGES.items()}
