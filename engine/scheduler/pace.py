"""The pace of steps: how many prompt tokens a step may compute beside the next tokens of decoding requests.

    time of a step  =  time of the decoding rows  +  start of a step with prompts  +  prompt tokens * time of one

All are learned from the steps that ran, on any device: of rows by powers of two, of prompts by powers of two of their
context. A step with prompts starts slowly on a GPU, launched kernel by kernel; short prompts then are no sign of slow
tokens. A step with too many prompt tokens holds up every stream of the engine. With an objective, prompts get the time
that is left (stall-free batching, Sarathi-Serve, Agrawal et al., 2024, there with a fixed budget of tokens). Without an
objective of the user, prompt tokens get three quarters of the time, and more where they would wait longer than CLEAR_S.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from engine.state.inputs import ScheduledStep

MIN_TOKENS: Final = 16
"""Prompt tokens of a step at least, whatever the objective: prompts come to their end."""
CLEAR_S: Final = 0.5
"""Time in which the waiting prompts shall be computed, where nothing else is asked for."""
_SHARES: Final = 0.75, 0.9
"""Least and greatest share of a step's time for prompts, where nothing else is asked for."""
_NEWEST: Final = 0.2
"""Weight of the newest time in a mean."""
_OUTLIER: Final = 4.0
"""A time of more than so many means counts as this: a stall of the machine says nothing about steps."""
_ORIGIN: Final = 0.02
"""Weight of "no tokens take no time" among steps with prompts: of equally many tokens in each, they take all of it."""
_LEAST_PART: Final = 1 / 16
"""A token takes this part of its share of a mean step at least: less is noise."""


class PrefillPace:
    """Learns how long steps take, and limits the prompt tokens of the next step."""

    def __init__(self, objective_s: float | None = None) -> None:
        """`objective_s` is the longest time of a step with decoding requests; None adapts it to rows and prompts."""
        self._objective_s = objective_s
        self._rows: dict[int, _Line] = {}
        self._prompts: dict[int, _Line] = {}
        self.last_limit = 0
        """Limit of the last step that had one, in tokens."""

    def limit(self, num_decodes: int, context: int, num_waiting: int) -> int | None:
        """Return the number of prompt tokens beside `num_decodes` rows, the first prompt token at position `context`.

        `num_waiting` prompt tokens could be computed now. None: no limit, as nothing is known yet.
        """
        rows, prompts = _nearest(self._rows, num_decodes), _nearest(self._prompts, context)
        if rows is None or prompts is None:
            return None
        start_s, token_s = prompts.fit()
        without_s = rows.fit()[0] + start_s
        if self._objective_s is not None:
            left_s = self._objective_s - without_s
        else:
            least, greatest = _SHARES
            share = min(max(num_waiting * token_s / CLEAR_S, least), greatest)
            left_s = without_s * share / (1 - share)
        self.last_limit = max(MIN_TOKENS, int(left_s / token_s))
        return self.last_limit

    def observe(self, step: ScheduledStep, seconds: float) -> None:
        """Learn from a step that took `seconds`, after its tokens are counted as computed."""
        rows = step.num_decodes
        tokens = sum(step.num_tokens) - rows
        if not tokens:
            self._rows.setdefault(rows.bit_length(), _Line()).add(0, seconds)
            return
        prompts = zip(step.sequences[rows:], step.num_tokens[rows:], strict=True)
        context = max(sequence.num_computed_tokens - count for sequence, count in prompts)
        alone = _nearest(self._rows, rows) if rows else None
        rows_s = alone.fit()[0] if alone is not None else 0.0
        self._prompts.setdefault(context.bit_length(), _Line()).add(tokens, max(seconds - rows_s, 0.0))


class _Line:
    """Seconds by tokens: a line of least squares through running means."""

    def __init__(self) -> None:
        self._means = np.zeros(4)  # of seconds, tokens, tokens squared, and the product of both
        self._weight = 1.0

    def add(self, tokens: int, seconds: float) -> None:
        if self._weight < 1:
            start_s, token_s = self.fit()
            seconds = min(seconds, _OUTLIER * (start_s + tokens * token_s))
        self._means += self._weight * (np.array([seconds, tokens, tokens**2, tokens * seconds]) - self._means)
        self._weight = _NEWEST

    def fit(self) -> tuple[float, float]:
        """Return the seconds of no tokens and of each token."""
        seconds, tokens, squares, products = self._means.tolist()
        about_origin = _ORIGIN * tokens
        variance = squares - tokens**2 + about_origin * tokens
        most_s = seconds / max(tokens, 1.0)
        token_s = (products - tokens * seconds + about_origin * seconds) / max(variance, 1e-9)
        token_s = min(max(token_s, most_s * _LEAST_PART, 1e-9), most_s)
        return seconds - token_s * tokens, token_s


def _nearest(lines: dict[int, _Line], size: int) -> _Line | None:
    """Return the line for a power of two, else the nearest; None before the first."""
    key = size.bit_length()
    if key in lines or not lines:
        return lines.get(key)
    return lines[min(lines, key=lambda other: abs(other - key))]
