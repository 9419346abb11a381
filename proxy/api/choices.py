"""Whole answers: the deltas of every sequence put together, and the best of them picked."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.messages import TokenLogprob
from proxy.dispatch.text_stream import Delta, Finish


@dataclass
class Choice:
    """The complete answer of a sequence."""

    text: str = ""
    finish_reason: Finish | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    score: float | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.score = delta.score if delta.score is not None else self.score

    @property
    def mean_logprob(self) -> float:
        """Log-probability per token."""
        return sum(entry.logprob for entry in self.logprobs) / max(1, len(self.logprobs))


def best(choices: list[Choice], count: int) -> list[Choice]:
    """Return the `count` choices with the highest log-probability per token, best first; up to `count` choices keep
    their order."""
    if len(choices) <= count:
        return choices
    return sorted(choices, key=lambda choice: choice.mean_logprob, reverse=True)[:count]
