"""Settings of a request: the choice of the next token."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from common.errors import invalid

MIN_TEMPERATURE: Final = 1e-5
"""Below this, dividing logits by the temperature overflows: it means greedy."""
MAX_LOGPROBS: Final = 20
"""Likeliest tokens reported at one position, as in OpenAI's API."""
MAX_SEQUENCES: Final = 128
"""Sequences of one request."""
MAX_STOP_STRINGS: Final = 16
MAX_STOP_CHARS: Final = 1024
"""Of one stop string."""
MAX_GRAMMAR_BYTES: Final = 64 * 2**10
"""Of the text of one grammar."""
MAX_LENGTH_PENALTY: Final = 5.0
"""Larger powers of a long output's length overflow single precision."""


class Grammar(msgspec.Struct, frozen=True):
    """A constraint on the output: a JSON schema, a regular expression, a context-free grammar (Lark or GBNF), a choice
    of strings (`choice`, a JSON list), or any JSON object (`json_object`, no text)."""

    kind: Literal["json_schema", "json_object", "regex", "grammar", "choice"]
    text: str = ""


class TimestampRules(msgspec.Struct, frozen=True):
    """Whisper's rules for timestamps (Radford et al., 2022, decoding.py): timestamps come in pairs and never go back.

    Ids from `first_token_id` on are timestamps; `no_timestamps_token_id` never appears. `max_initial_index` bounds the
    first timestamp, in steps of 20 ms.
    """

    first_token_id: int
    no_timestamps_token_id: int
    max_initial_index: int | None = None


class Alignment(msgspec.Struct, frozen=True):
    """Ask when the prompt's tokens after the first `first_token` were spoken, within `num_frames` of the encoder.

    The prompt is a whole transcript with the end of sequence. Frames come with `prompt_logprobs`.
    """

    first_token: int
    num_frames: int


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a request; names and meanings follow vLLM and OpenAI.

    `stop` strings and `bad_words` are handled by whoever faces the user (`LLM`, the proxy; the latter become
    `bad_words_ids`); everything else by the worker.

    n                     sequences of the request, generated independently of each other
    beam_width            beam search with so many beams instead of sampling; the `n` best are returned
    length_penalty        a beam's score is its log-probability / length ** length_penalty
    early_stopping        stop as soon as `beam_width` beams have ended
    min_tokens            tokens before which no end-of-sequence or stop token may appear
    top_p, top_k, min_p   keep the nucleus; the k likeliest (0, -1: all); what is min_p times as likely as the best
    repetition_penalty    divides (or multiplies, where negative) the logits of tokens of the prompt and the output
    presence_penalty, frequency_penalty   subtracted once, or per occurrence, from the logits of output tokens
    no_repeat_ngram_size  n-grams of this size appear at most once (0: off), those of the decoder prompt counted
    logit_bias            added to the logits of token ids
    allowed_token_ids     if given, the only ones that may appear
    bad_words_ids         token sequences that never appear
    logprobs              how many of the likeliest tokens are reported at each output token (0: the sampled one alone)
    prompt_logprobs       the same for the tokens of the prompt
    forced_eos_token_id   the token that a sequence which reaches `max_tokens` ends with
    num_forced_tokens     tokens at the end of the prompt that the checkpoint forces (a BOS): for the length of a beam
                          they count as generated, as they do in transformers
    prefix_allowed[i]     the token ids of which the likeliest is the i-th generated token: forced tokens are lists of
                          one, Whisper's language detection is the list of its language tokens
    alignment             when the tokens of the prompt were spoken; needs prompt_logprobs
    adapter               the LoRA adapter that all tokens are computed with, prompt included; "" for none
    suppress_tokens never appear; `begin_suppress_tokens` do not appear as the first token after the prefix.
    """

    n: int = 1
    beam_width: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    prefix_allowed: tuple[tuple[int, ...], ...] = ()
    forced_eos_token_id: int | None = None
    num_forced_tokens: int = 0
    timestamps: TimestampRules | None = None
    grammar: Grammar | None = None
    alignment: Alignment | None = None
    adapter: str = ""

    @property
    def greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE or self.top_k == 1

    @property
    def uses_beams(self) -> bool:
        return self.beam_width > 1

    @property
    def num_sequences(self) -> int:
        """The number of sequences in parallel."""
        return max(self.n, self.beam_width)

    def validate(self) -> SamplingParams:
        """Return self, or raise TriptychError("invalid_request") naming the field and the value."""
        biases = self.logit_bias.values()
        counts = (self.logprobs, self.prompt_logprobs)
        are_counts = [count is None or 0 <= count <= MAX_LOGPROBS for count in counts]
        checks = (
            ("n", 1 <= self.n <= MAX_SEQUENCES, f"must be between 1 and {MAX_SEQUENCES}"),
            ("beam_width", 1 <= self.beam_width <= MAX_SEQUENCES, f"must be between 1 and {MAX_SEQUENCES}"),
            ("n", not self.uses_beams or self.n <= self.beam_width, "must be at most beam_width"),
            (
                "length_penalty",
                abs(self.length_penalty) <= MAX_LENGTH_PENALTY,
                f"must be between {-MAX_LENGTH_PENALTY:g} and {MAX_LENGTH_PENALTY:g}",
            ),
            ("max_tokens", self.max_tokens >= 1, "must be at least 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"must be 0 to max_tokens={self.max_tokens}"),
            ("temperature", 0.0 <= self.temperature <= 2.0, "must be between 0 and 2"),
            ("top_p", 0.0 < self.top_p <= 1.0, "must be above 0 and at most 1"),
            ("top_k", self.top_k >= -1, "must be 0 or -1 (off) or positive"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "must be between 0 and 1"),
            ("repetition_penalty", 0.0 < self.repetition_penalty <= 1e3, "must be above 0 and at most 1000"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "must be between -2 and 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "must be between -2 and 2"),
            ("no_repeat_ngram_size", self.no_repeat_ngram_size >= 0, "must be 0 (off) or positive"),
            ("logit_bias", all(-100.0 <= bias <= 100.0 for bias in biases), "takes values between -100 and 100"),
            ("bad_words", all(self.bad_words), "takes non-empty strings"),
            ("bad_words_ids", all(self.bad_words_ids), "takes non-empty token sequences"),
            ("prefix_allowed", all(self.prefix_allowed), "needs at least one token at every position"),
            ("logprobs", are_counts[0], f"must be between 0 and {MAX_LOGPROBS}"),
            ("prompt_logprobs", are_counts[1], f"must be between 0 and {MAX_LOGPROBS}"),
            ("alignment", self.alignment is None or self.prompt_logprobs is not None, "needs prompt_logprobs"),
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**64, "must fit into 64 bits"),
            (
                "stop",
                len(self.stop) <= MAX_STOP_STRINGS and all(0 < len(text) <= MAX_STOP_CHARS for text in self.stop),
                f"takes at most {MAX_STOP_STRINGS} non-empty strings of at most {MAX_STOP_CHARS} characters",
            ),
        )
        for name, good, rule in checks:
            if not good:
                raise invalid(f"{name} {rule}, not {getattr(self, name)!r:.200}", name)
        return self
