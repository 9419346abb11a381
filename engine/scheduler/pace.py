"""The pace of steps: how many prompt tokens a step may compute beside the next tokens of decoding requests.

    time of a step  =  time of the decoding rows  +  prompt tokens * time of one in their context

Both times are learned from the steps that ran, on any device: means by powers of two, of rows and of context. The
first prompt shows the time of a token, and the first step of decoding rows, which runs without prompts, theirs. A step
with too many prompt tokens holds up every stream of the engine. With an objective, prompts get the time that is left
(stall-free batching, Sarathi-Serve, Agrawal et al., 2024, there with a fixed budget of tokens). Without an objective of
the user, prompts get three quarters of the time, and more where they would wait longer than CLEAR_S for it.

A GPU works while a step is launched, and takes as long for a few tokens as for decoding rows: it reads the weights.
Neither is the time of prompt tokens; were it taken for theirs, chunks would become as small as can be.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from engine.state.inputs import ScheduledStep, tile_of

MIN_TOKENS: Final = 16
"""Prompt tokens of a step at least, whatever the objective: prompts come to their end."""
CLEAR_S: Final = 0.5
"""Time in which the waiting prompts shall be computed, where nothing else is asked for."""
_SHARES: Final = 0.75, 0.9
"""Least and greatest share of a step's time for prompts, where nothing else is asked for."""
_NEWEST: Final = 0.2
"""Weight of the newest time in a mean, at least."""
_LEAST_TOKEN_S: Final = 1e-6
"""Of a token done within the time of the others."""
_OUTLIER: Final = 4.0
"""A time of more than so many means counts as this: a stall of the machine says nothing about steps."""


class PrefillPace:
    """Learns how long steps take, and limits the prompt tokens of the next step."""

    def __init__(self, objective_s: float | None = None) -> None:
        """`objective_s` is the longest time of a step with decoding requests; None adapts it to rows and prompts."""
        self._objective_s = objective_s
        self._rows_s = _Means()
        self._token_s = _Means()
        self._launch_s = _Means()
        self.last_limit = 0
        """Limit of the last step that had one, in tokens."""

    def limit(self, num_decodes: int, context: int, num_waiting: int) -> int | None:
        """Return the number of prompt tokens beside `num_decodes` rows, the first prompt token at position `context`.

        `num_waiting` prompt tokens could be computed now. None: no limit, as no prompt has run yet. 0: rows have
        never run, and show their time by a step alone.
        """
        rows_s, token_s = self._rows_s.at(num_decodes), self._token_s.at(context)
        if rows_s is None:
            return 0
        if token_s is None:
            return None
        if self._objective_s is not None:
            left_s = self._objective_s - max(rows_s, self._launch_s.at(0) or 0.0)
        else:
            least, greatest = _SHARES
            share = min(max(num_waiting * token_s / CLEAR_S, least), greatest)
            left_s = rows_s * share / (1 - share)
        total = num_decodes + max(MIN_TOKENS, int(left_s / token_s))
        self.last_limit = max(MIN_TOKENS, total - total % tile_of(total) - num_decodes)
        return self.last_limit

    def observe(self, step: ScheduledStep, seconds: float, launch_s: float = 0.0) -> None:
        """Learn from a step that took `seconds`, after its tokens are counted as computed.

        `launch_s` of them were its launch, on a device that works meanwhile.
        """
        rows = step.num_decodes
        tokens = sum(step.num_tokens) - rows
        if not tokens:
            self._rows_s.add(rows, seconds)
            return
        prompts = zip(step.sequences[rows:], step.num_tokens[rows:], strict=True)
        context = max(sequence.num_computed_tokens - count for sequence, count in prompts)
        token_s = self._token_s.at(context)
        rows_s = self._rows_s.at(rows) if rows else None
        if launch_s:
            self._launch_s.add(0, launch_s)
        if token_s is None and rows and tokens < MIN_TOKENS:
            return  # nearly all of the step's time may be that of rows
        if launch_s or not rows or token_s is None:
            if rows or token_s is None:
                others_s = max(launch_s, rows_s or 0.0)
                self._token_s.add(context, max((seconds - others_s) / tokens, _LEAST_TOKEN_S), tokens)
            return
        if rows_s is None:
            return
        # Where every step has prompts, no step shows the rows alone: both parts share the error of the sum.
        error = seconds / (rows_s + tokens * token_s)
        self._rows_s.add(rows, error * rows_s)
        self._token_s.add(context, error * token_s, tokens)


class _Means:
    """Running means of times, by the power of two of a size. That of a token weighs as its tokens among all so far."""

    def __init__(self) -> None:
        self._means: dict[int, float] = {}
        self._tokens = Counter[int]()

    def at(self, size: int) -> float | None:
        """Return the mean for `size`, else the mean for the nearest size; None before the first time."""
        if not self._means:
            return None
        key = size.bit_length()
        return self._means[min(self._means, key=lambda other: abs(other - key))]

    def add(self, size: int, seconds: float, tokens: int = 0) -> None:
        key = size.bit_length()
        self._tokens[key] += tokens
        weight = max(_NEWEST, tokens / (self._tokens[key] or 1))
        mean = self._means.get(key, seconds)
        self._means[key] = mean + weight * (min(seconds, _OUTLIER * mean) - mean)
