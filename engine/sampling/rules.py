"""Rules on a model's scores before the choice of a token: biases, penalties, forbidden, allowed and forced tokens.

The order is that of transformers' `generate`, where it has the rule:

    logit bias -> repetition -> frequency and presence -> forbidden tokens (n-grams, bad words, min_tokens, suppressed)
    -> allowed ids -> timestamps -> grammar

A forced token (a prefix, or the end at the last token) stands instead of all of them. The rules that name single
tokens become one indexed operation over the whole batch. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from common.errors import ErrorInfo
from common.sampling_params import SamplingParams
from engine.device.h2d import send
from engine.sampling.history import BadWords, FloatArray, NGrams, TokenCounts
from engine.sampling.timestamps import apply_timestamp_rules
from engine.state.request import Sequence
from engine.state.spec import IntArray

if TYPE_CHECKING:  # at run time it is loaded with the first grammar
    from engine.sampling.grammar import GrammarMatcher

_PENALTIES: Final = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_READING_TOKENS: Final = (*_PENALTIES, "no_repeat_ngram_size", "bad_words_ids", "timestamps", "grammar")
"""Rules that depend on which tokens came before; the others only on how many."""
_RULES: Final = (
    *_READING_TOKENS,
    "min_tokens",
    "logit_bias",
    "allowed_token_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "prefix_allowed",
    "forced_eos_token_id",
)
_NO_RULES: Final = SamplingParams()


@dataclass(frozen=True)
class Vocabulary:
    """Facts about a model's tokens, for the rules."""

    size: int
    eos_token_ids: tuple[int, ...]


class SequenceState:
    """The rules of a sequence and their memory of its tokens, derived from the sequence alone.

    `error` says why there is no matcher of its grammar.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocabulary: Vocabulary,
        grammar: GrammarMatcher | None = None,
        error: ErrorInfo | None = None,
    ) -> None:
        self.has_rules = _has_any(params, _RULES)
        self.can_run_ahead = not _has_any(params, _READING_TOKENS)
        self.grammar, self.error = grammar, error
        self.counts = TokenCounts(vocabulary.size) if _has_any(params, _PENALTIES) else None
        self.ngrams = NGrams(params.no_repeat_ngram_size, vocabulary.size) if params.no_repeat_ngram_size else None
        self.bad_words = BadWords(params.bad_words_ids, vocabulary.eos_token_ids) if params.bad_words_ids else None
        self.suppressed = np.array(params.suppress_tokens, np.int64)
        self.begin_suppressed = np.array(params.begin_suppress_tokens, np.int64)
        ends = (*vocabulary.eos_token_ids, *params.stop_token_ids) if params.min_tokens else ()
        self.ends = np.array(ends, np.int64)
        self.biased = np.array(tuple(params.logit_bias), np.int64)
        self.biases = np.array(list(params.logit_bias.values()), np.float32)
        self._num_seen = 0

    def catch_up(self, sequence: Sequence) -> None:
        """Record the tokens added since the last call."""
        begin, self._num_seen = self._num_seen, len(sequence.token_ids)
        if self.counts is None and self.ngrams is None and self.grammar is None:
            return
        num_prompt = sequence.num_prompt_tokens
        grammar_begin = num_prompt + len(sequence.sampling.prefix_allowed)
        for position in range(begin, self._num_seen):
            token_id = sequence.token_ids[position]
            if self.counts is not None:
                self.counts.append(token_id, is_output=position >= num_prompt)
            if self.ngrams is not None:
                self.ngrams.append(token_id)
            if self.grammar is not None and position >= grammar_begin:
                self.grammar.accept(token_id)

    def forbidden(self, sequence: Sequence) -> list[IntArray]:
        """Return the ids of forbidden next tokens."""
        params, position = sequence.sampling, sequence.num_output_tokens
        parts = [self.suppressed]
        if position == len(params.prefix_allowed):
            parts.append(self.begin_suppressed)
        if position < params.min_tokens:
            parts.append(self.ends)
        if self.ngrams is not None:
            parts.append(np.array(self.ngrams.completing(), np.int64))
        if self.bad_words is not None:
            parts.append(np.array(self.bad_words.completing(sequence.token_ids), np.int64))
        return [part for part in parts if len(part)]


class _RuledRow(NamedTuple):
    number: int
    sequence: Sequence
    state: SequenceState


def apply_rules(
    scores: torch.Tensor,
    sequences: ListOf[Sequence],
    states: ListOf[SequenceState],
    vocabulary: Vocabulary,
) -> None:
    """Apply each sequence's rules to its row of scores [num_sequences, vocab_size], in place.

    Scores are logits, or log-probabilities in beam search. A row may be left without any token above -inf.
    """
    rows = []
    for row in map(_RuledRow, range(len(sequences)), sequences, states):
        if not row.state.has_rules:
            continue
        forced = _forced_ids(row.sequence)
        if forced:
            _force(scores[row.number], forced)
        else:
            row.state.catch_up(row.sequence)
            rows.append(row)
    _add_biases(scores, rows)
    _penalise_repetition(scores, rows)
    _penalise_output(scores, rows)
    _forbid(scores, rows)
    for index, sequence, state in rows:
        params = sequence.sampling
        if params.allowed_token_ids:
            _keep(scores[index], params.allowed_token_ids)
        if params.timestamps is not None:
            begin = sequence.num_prompt_tokens + len(params.prefix_allowed)
            eos_token_id = vocabulary.eos_token_ids[0]
            apply_timestamp_rules(scores[index], sequence.token_ids[begin:], params.timestamps, eos_token_id)
        if state.grammar is not None:
            _follow(scores[index], state.grammar)


def _has_any(params: SamplingParams, names: ListOf[str]) -> bool:
    return any(getattr(params, name) != getattr(_NO_RULES, name) for name in names)


def _forced_ids(sequence: Sequence) -> tuple[int, ...]:
    """Return the only allowed next tokens, regardless of other rules; empty for a free choice."""
    params, position = sequence.sampling, sequence.num_output_tokens
    if params.forced_eos_token_id is not None and position == params.max_tokens - 1:
        return (params.forced_eos_token_id,)
    return params.prefix_allowed[position] if position < len(params.prefix_allowed) else ()


def _force(row: torch.Tensor, token_ids: ListOf[int]) -> None:
    """Leave the likeliest of the allowed tokens, whatever the temperature, with a score of 0: at no cost to a beam."""
    [index] = send(row.device, np.array(token_ids, np.int64))
    likeliest = index[row[index].argmax(dim=0, keepdim=True)]
    row.fill_(-torch.inf).index_fill_(0, likeliest, 0.0)


def _keep(row: torch.Tensor, token_ids: ListOf[int]) -> None:
    [index] = send(row.device, np.array(token_ids, np.int64))
    kept = row[index]
    row.fill_(-torch.inf)
    row[index] = kept


def _follow(row: torch.Tensor, grammar: GrammarMatcher) -> None:
    """Keep tokens allowed by the grammar; the grammar wins against rules that forbid all of them."""
    allowed = grammar.allowed()
    if grammar.error is not None:
        row.fill_(-torch.inf)
        return
    [mask] = send(row.device, allowed)
    row.masked_fill_(~mask, -torch.inf)
    row.masked_fill_(mask & (row.amax() == -torch.inf), 0.0)


def _add_biases(scores: torch.Tensor, rows: ListOf[_RuledRow]) -> None:
    named = [(row.number, row.state.biased, row.state.biases) for row in rows if len(row.state.biased)]
    _change(scores, named, torch.add)


def _penalise_repetition(scores: torch.Tensor, rows: ListOf[_RuledRow]) -> None:
    """Divide positive and multiply negative scores of past tokens (Keskar et al., 2019)."""
    named = []
    for index, sequence, state in rows:
        penalty = sequence.sampling.repetition_penalty
        if penalty != 1.0 and state.counts is not None:
            named.append((index, state.counts.seen, np.full(len(state.counts.seen), penalty, np.float32)))
    _change(scores, named, lambda past, penalties: torch.where(past < 0, past * penalties, past / penalties))


def _penalise_output(scores: torch.Tensor, rows: ListOf[_RuledRow]) -> None:
    named = []
    for index, sequence, state in rows:
        params = sequence.sampling
        if state.counts is not None and (params.frequency_penalty != 0.0 or params.presence_penalty != 0.0):
            ids, counts = state.counts.generated
            named.append((index, ids, params.frequency_penalty * counts + np.float32(params.presence_penalty)))
    _change(scores, named, torch.sub)


def _forbid(scores: torch.Tensor, rows: ListOf[_RuledRow]) -> None:
    named = [(row.number, ids) for row in rows for ids in row.state.forbidden(row.sequence)]
    if named:
        scores[_locate(scores, named)] = scores.new_full((), -torch.inf)  # a number would be copied, with a wait


def _locate(scores: torch.Tensor, named: ListOf[tuple[int, IntArray]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of every named token."""
    rows = np.repeat([index for index, _ in named], [len(ids) for _, ids in named])
    columns = np.concatenate([ids for _, ids in named])
    where = send(scores.device, rows, columns)
    return where[0], where[1]


def _change(
    scores: torch.Tensor,
    named: ListOf[tuple[int, IntArray, FloatArray]],
    how: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Compute the scores of named tokens anew, each from itself and a value."""
    if named:
        where = _locate(scores, [(index, ids) for index, ids, _ in named])
        [values] = send(scores.device, np.concatenate([values for _, _, values in named]))
        scores[where] = how(scores[where], values.to(scores.dtype))
