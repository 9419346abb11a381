"""Messages of a decoder engine: plain values that know no network.

Facts that travel as they are have the types of `common.messages`. Their `attempt`, or `request_attempt` where `attempt`
counts handoffs, is the one given to `DecoderEngine.add_request`.

    Tokens, Failed                 the output of a request, and its end with an error
    Grant, Receipt, InputNeeded    answers to offers and tensors of inputs; of KV, with input id KV_INPUT_ID
    KvReady, KvComputed, Prefilled the progress of a request that was added with `prefill_only`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from common.messages import Failed, Grant, InputNeeded, KvOffer, Prefilled, Receipt, Tokens


@dataclass(frozen=True)
class KvReady:
    """Start of a prefill that has every input: the KV can be offered.

    The sender completes `offer` by its own name, the attempts and a deadline.
    """

    request_id: str
    offer: KvOffer
    attempt: int = 0


@dataclass(frozen=True)
class KvComputed:
    """Progress of a prefill: the KV of the first `num_tokens` tokens is in its blocks, all of cross-attention's too."""

    request_id: str
    num_tokens: int
    attempt: int = 0


PrefillEvent: TypeAlias = KvReady | KvComputed | Prefilled
"""Events of a request that was added with `prefill_only`. `Prefilled` ends it: no memory of the engine is held for it,
though its blocks may stay in the prefix cache."""

Event: TypeAlias = Tokens | Failed | Grant | Receipt | InputNeeded | PrefillEvent
