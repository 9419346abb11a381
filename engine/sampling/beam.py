"""Beam search of one request, step by step, with the arithmetic of transformers' `generate(num_beams=…)`.

    log-probabilities [beams, vocab] + scores of the beams
        -> the best 2 * beams continuations (more where there are several end-of-sequence tokens)
           ├─ those that have ended, among the best `beams`: kept with score / length ** length_penalty
           └─ the best `beams` that go on: the next beams, each with a parent and a token

The search ends when no running beam can still beat the worst of the ended ones, when all have ended and
`early_stopping` is set, or at the longest length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from common.sampling_params import SamplingParams

_NEVER: Final = -1e9


@dataclass(frozen=True)
class Beam:
    """A running beam after a step: its parent beam and new token."""

    parent: int
    token_id: int


@dataclass(frozen=True)
class Hypothesis:
    """An ended sequence. `score` is its log-probability divided by length ** length_penalty.

    `stopped` tells an end by a token from one at the greatest length.
    """

    token_ids: list[int]
    score: float
    stopped: bool


class BeamSearch:
    """State of a beam search. `end_token_ids` end a beam, `max_tokens` bounds the generated tokens."""

    def __init__(self, sampling: SamplingParams, end_token_ids: Sequence[int], max_tokens: int) -> None:
        self.sampling = sampling
        self.max_tokens = max_tokens
        self._ends = frozenset(end_token_ids)
        width = sampling.beam_width
        self._num_candidates = max(2, 1 + len(self._ends)) * width
        self._scores = torch.full((width,), _NEVER)
        self._scores[0] = 0.0
        self._ended_scores = torch.full((width,), _NEVER)
        self._ended: list[list[int] | None] = [None] * width
        self._generated = sampling.num_forced_tokens

    def step(self, log_probs: Tensor, outputs: Sequence[Sequence[int]]) -> list[Beam] | None:
        """Advance by log_probs [beams, vocab] (after all rules) of the beams with tokens `outputs`.

        The first step takes the single sequence of the prompt. Returns the next beams, best first, or None at the end.
        """
        width = self.sampling.beam_width
        log_probs = log_probs.float().cpu().expand(width, -1)
        outputs = outputs if len(outputs) == width else [outputs[0]] * width
        everything = (log_probs + self._scores[:, None]).view(-1)
        scores, indices = torch.topk(everything, min(self._num_candidates, len(everything)))
        vocab_size = log_probs.shape[1]
        beams = [Beam(index // vocab_size, index % vocab_size) for index in indices.tolist()]
        at_limit = len(outputs[0]) + 1 >= self.max_tokens
        ends = torch.tensor([at_limit or beam.token_id in self._ends for beam in beams])
        running = scores + ends.float() * _NEVER
        best = torch.topk(running, width)[1]
        self._scores = running[best]
        self._keep_ended(scores, ends, beams, outputs)
        self._generated += 1
        best_possible = float(self._scores[0]) / self._generated**self.sampling.length_penalty
        worst = float(self._ended_scores.min()) if self._all_ended else _NEVER
        can_improve = best_possible > worst
        if not can_improve or (self._all_ended and self.sampling.early_stopping) or bool(ends.all()):
            return None
        return [beams[index] for index in best.tolist()]

    def _keep_ended(
        self, scores: Tensor, ends: Tensor, beams: Sequence[Beam], outputs: Sequence[Sequence[int]]
    ) -> None:
        """Merge newly ended beams into the ended hypotheses; only the best `beam_width` candidates count."""
        width = self.sampling.beam_width
        just_ended = ends.clone()
        just_ended[width:] = False
        scores = scores / (self._generated + 1) ** self.sampling.length_penalty
        scores = scores + (~just_ended).float() * _NEVER
        merged = torch.cat((self._ended_scores, scores))
        kept = torch.topk(merged, width)[1]
        candidates = [
            [*outputs[beam.parent], beam.token_id] if ended else None
            for beam, ended in zip(beams, just_ended.tolist(), strict=True)
        ]
        everyone = [*self._ended, *candidates]
        self._ended = [everyone[index] for index in kept.tolist()]
        self._ended_scores = merged[kept]

    @property
    def _all_ended(self) -> bool:
        return all(tokens is not None for tokens in self._ended)

    def best(self) -> list[Hypothesis]:
        """Return the ended sequences, best first, at most `n`; none if the rules left no next token."""
        pairs = zip(self._ended, self._ended_scores.tolist(), strict=True)
        ended = [Hypothesis(tokens, score, tokens[-1] in self._ends) for tokens, score in pairs if tokens is not None]
        return ended[: self.sampling.n]
