"""From logits to the next token of every sequence."""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from typing import TYPE_CHECKING

import numpy as np
import torch

from common.errors import ErrorInfo, TriptychError
from common.model_info import ModelInfo
from common.sampling_params import SamplingParams
from engine.device.h2d import select_rows, send
from engine.sampling import rules
from engine.sampling.device_draw import draw_on_device
from engine.sampling.draw import draw, uniform
from engine.sampling.logprobs import measure
from engine.sampling.pending import PendingTokens, Report, Sampled
from engine.state.request import Sequence

if TYPE_CHECKING:
    from engine.sampling.grammar import GrammarCompiler


class Sampler:
    """Greedy and random choice under each sequence's rules.

    What a sequence draws depends on its seed and its position alone, never on the batch, so another instance that
    takes a request over goes on with the same tokens.
    """

    def __init__(self, info: ModelInfo, vocab_size: int) -> None:
        self._info = info
        ends = tuple(token for token in info.eos_token_ids if token < vocab_size)
        self._vocabulary = rules.Vocabulary(vocab_size, ends)
        self._grammars: GrammarCompiler | None = None

    def sample(self, logits: torch.Tensor, sequences: ListOf[Sequence]) -> list[Sampled]:
        """logits [num_sequences, vocab_size], float32 (may be changed in place) -> the next token of each."""
        sampled = self.launch(logits, sequences).wait()
        return [
            one if sequence.sampling.grammar is None else one._replace(error=self.error(sequence))
            for one, sequence in zip(sampled, sequences, strict=True)
        ]

    def can_run_ahead(self, sequence: Sequence) -> bool:
        """Return whether the next token can be chosen before earlier tokens are known: no rules over tokens."""
        return self._state(sequence).can_run_ahead

    def launch(self, logits: torch.Tensor, sequences: ListOf[Sequence]) -> PendingTokens:
        """Choose the same tokens as `sample`, with log-probabilities where asked, without waiting for the device.
        logits [num_sequences, vocab_size], float32, may change in place."""
        reported = [row for row, sequence in enumerate(sequences) if sequence.sampling.logprobs is not None]
        raw = select_rows(logits, reported) if reported else None  # the rules write into the logits
        states = [self._state(sequence) for sequence in sequences]
        if any(state.has_rules for state in states):
            rules.apply_rules(logits, sequences, states, self._vocabulary)
            # A sequence with contradictory rules ends if possible; token 0 would be meaningless.
            ends = self._vocabulary.eos_token_ids
            logits[:, ends[0] if ends else 0].masked_fill_(logits.amax(dim=-1) == -torch.inf, 0.0)
        tokens = self._choose(logits, sequences)
        if raw is None:
            return PendingTokens(tokens)
        counts = [sequences[row].sampling.logprobs or 0 for row in reported]
        return PendingTokens(tokens, Report(reported, counts, measure(raw, select_rows(tokens, reported), max(counts))))

    def apply_rules(self, scores: torch.Tensor, sequences: ListOf[Sequence]) -> None:
        """The rules alone, in place, on scores [num_sequences, vocab_size]: log-probabilities, in beam search.

        Where the grammar of a sequence has failed, nothing is left of its row and `error` says why.
        """
        states = [self._state(sequence) for sequence in sequences]
        rules.apply_rules(scores, sequences, states, self._vocabulary)

    def error(self, sequence: Sequence) -> ErrorInfo | None:
        """Return why a sequence cannot go on after its last step; None if the sequence can."""
        state = self._state(sequence)
        return state.error if state.grammar is None else state.grammar.error

    def check(self, sampling: SamplingParams) -> None:
        """Raise TriptychError("invalid_request") naming the field where a request's rules cannot be followed here."""
        timestamps, forced = sampling.timestamps, sampling.forced_eos_token_id
        named = {
            "logit_bias": list(sampling.logit_bias),
            "allowed_token_ids": list(sampling.allowed_token_ids),
            "bad_words_ids": [token for sequence in sampling.bad_words_ids for token in sequence],
            "stop_token_ids": list(sampling.stop_token_ids),
            "suppress_tokens": list(sampling.suppress_tokens),
            "begin_suppress_tokens": list(sampling.begin_suppress_tokens),
            "prefix_allowed": [token for allowed in sampling.prefix_allowed for token in allowed],
            "forced_eos_token_id": [] if forced is None else [forced],
            "timestamps": [timestamps.first_token_id, timestamps.no_timestamps_token_id] if timestamps else [],
        }
        for name, token_ids in named.items():
            bad = next((token for token in token_ids if not 0 <= token < self._vocabulary.size), None)
            if bad is not None:
                message = f"token id {bad} in {name} is outside the vocabulary of {self._vocabulary.size}"
                raise TriptychError("invalid_request", message, name)
        if timestamps is not None and not self._vocabulary.eos_token_ids:
            message = f"{self._info.name} has no end-of-sequence token: timestamps need one"
            raise TriptychError("invalid_request", message, "timestamps")
        if sampling.grammar is not None:
            self._compiler().start(sampling.grammar)

    def _choose(self, scores: torch.Tensor, sequences: ListOf[Sequence]) -> torch.Tensor:
        """Return int64 [num_sequences] on the scores' device."""
        if scores.device.type != "cpu":  # `draw` would wait for every answer on its way
            return choose_on_device(scores, sequences)
        random = [row for row, sequence in enumerate(sequences) if not sequence.sampling.greedy]
        if len(random) < len(sequences):
            # numpy looks with vector instructions: a tenth of torch's time. The first of equals.
            tokens: list[int] = scores.numpy().argmax(axis=-1).tolist()
        else:
            tokens = [0] * len(sequences)
        if random:
            chosen = [sequences[row] for row in random]
            uniforms = [uniform(sequence.seed, sequence.num_output_tokens) for sequence in chosen]
            rows = scores if len(random) == len(sequences) else scores[random]
            for row, token in zip(random, draw(rows, [one.sampling for one in chosen], uniforms), strict=True):
                tokens[row] = token
        return torch.tensor(tokens, dtype=torch.int64)

    def _state(self, sequence: Sequence) -> rules.SequenceState:
        state = sequence.sampler_state
        if not isinstance(state, rules.SequenceState):
            wanted, grammar, error = sequence.sampling.grammar, None, None
            try:  # of many grammars that wait, the cache may have lost this one
                grammar = self._compiler().start(wanted) if wanted is not None else None
            except TriptychError as refused:
                error = refused.info
            state = rules.SequenceState(sequence.sampling, self._vocabulary, grammar, error)
            sequence.sampler_state = state
        return state

    def _compiler(self) -> GrammarCompiler:
        if self._grammars is None:
            from engine.sampling.grammar import GrammarCompiler

            self._grammars = GrammarCompiler(self._info, self._vocabulary.size)
        return self._grammars


def choose_on_device(scores: torch.Tensor, sequences: ListOf[Sequence]) -> torch.Tensor:
    """Choose the next token of each sequence, int64 [num_sequences], by work queued on the scores' device."""
    random = [row for row, sequence in enumerate(sequences) if not sequence.sampling.greedy]
    if not random:
        return scores.argmax(dim=-1)
    chosen = [sequences[row] for row in random]
    uniforms = [uniform(sequence.seed, sequence.num_output_tokens) for sequence in chosen]
    settings = [sequence.sampling for sequence in chosen]
    if len(random) == len(sequences):
        return draw_on_device(scores, settings, uniforms)
    [rows] = send(scores.device, np.array(random, np.int64))
    return scores.argmax(dim=-1).index_copy_(0, rows, draw_on_device(scores[rows], settings, uniforms))
