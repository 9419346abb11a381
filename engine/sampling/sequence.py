"""The sampler's view of a sequence."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from common.errors import ErrorInfo
from common.messages import TokenLogprob
from common.sampling_params import SamplingParams


class SampledSequence(Protocol):
    """A sequence waiting for its next token.

    token_ids          the decoder's prompt and what was generated so far
    seed               of this sequence alone: two sequences of a request have different ones
    sampler_state      the sampler's notes; None at first and after a fork or a resume. They follow from the other
                       fields, so that setting None costs time and changes nothing. Whoever changes tokens that are
                       already there (instead of appending) sets None.
    """

    sampler_state: object | None

    @property
    def token_ids(self) -> list[int]: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...
    @property
    def sampling(self) -> SamplingParams: ...
    @property
    def seed(self) -> int: ...


class Sampled(NamedTuple):
    """The next token of a sequence.

    `error` says why its request cannot go on: a grammar that has become too complex. `token_id` then means nothing.
    """

    token_id: int
    logprob: TokenLogprob | None = None
    error: ErrorInfo | None = None
