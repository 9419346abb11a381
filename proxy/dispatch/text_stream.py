"""Text of a job's tokens: detokenising, stop strings, usage, latencies."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from common.messages import FinishReason, TokenLogprob, Tokens
from common.telemetry import get_logger
from common.text.processor import Detokenizer, TextProcessor
from proxy.dispatch.jobs import Job
from proxy.server.limits import Ticket
from proxy.server.metrics import ProxyMetrics
from proxy.server.request_context import RequestContext

log = get_logger()


@dataclass(frozen=True)
class Delta:
    """New text of sequence `index`, and the tokens since the previous delta. The last delta has the finish reason.

    Tokens and text need not match piece by piece: text is held back while a character or a stop string may go on.
    """

    text: str
    finish_reason: FinishReason | None = None
    token_ids: tuple[int, ...] = ()
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    score: float | None = None


@dataclass
class Choice:
    """The complete answer of a sequence."""

    text: str = ""
    finish_reason: FinishReason | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    score: float | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.score = delta.score if delta.score is not None else self.score


def best(choices: list[Choice], count: int) -> list[Choice]:
    """Return the `count` choices with the highest log-probability per token, best first; up to `count` choices keep
    their order."""
    if len(choices) <= count:
        return choices

    def mean_logprob(choice: Choice) -> float:
        return sum(entry.logprob for entry in choice.logprobs) / max(1, len(choice.logprobs))

    return sorted(choices, key=mean_logprob, reverse=True)[:count]


@dataclass
class Usage:
    """Token counts of a response, the sum over the jobs of that response."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add(self, other: Usage) -> None:
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.cached_tokens += other.cached_tokens

    def to_json(self) -> dict[str, Any]:
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass
class TextSequence:
    """One text of a job. `token_ids` holds all generated tokens, special tokens included."""

    index: int
    detokenizer: Detokenizer
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_emitted: int = 0


@dataclass(eq=False, repr=False)
class TextStream:
    """The text of one job. `prompt_logprobs` are complete after the first delta, if the job asked for them.

    `_tokens` are the job's own, closed with `deltas`; `_ticket` waits for the first of them, or for the end.
    """

    job: Job
    _tokens: AsyncGenerator[Tokens]
    _text: TextProcessor
    _metrics: ProxyMetrics
    _context: RequestContext
    _ticket: Ticket
    _detokenizer: Detokenizer
    """Without tokens so far; each sequence has a copy."""
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    _first_s: float = 0.0

    def __post_init__(self) -> None:
        job, sampling = self.job, self.job.sampling
        self.usage = Usage(prompt_tokens=len(job.prompt_token_ids) + job.num_encoder_prompt_tokens)
        self.sequences = [TextSequence(index, replace(self._detokenizer, _ids=[])) for index in range(sampling.n)]
        self._eos_token_ids = self._text.info.eos_token_ids
        self._stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._eos_token_ids)}
        self._num_forced = len(sampling.prefix_allowed)
        """Tokens that the prompt format forces (Whisper's language, task): generated, but no part of the answer."""

    async def deltas(self) -> AsyncGenerator[Delta]:
        """Yield text as it becomes known, until every sequence has a finish reason; then close the job's tokens.

        A stop string may end a sequence before the worker does.
        """
        try:
            async with aclosing(self._tokens) as tokens:
                async for batch in tokens:
                    if not self._first_s:
                        self._first_s = time.monotonic()
                        if self._context.first_token_s is None:
                            self._context.first_token_s = self._first_s
                            self._metrics.ttft.observe(self._first_s - self._context.arrival_s)
                        self._ticket.release(begun=True)
                        log.debug("first token", request=self.job.request_id)
                    delta = self._delta(batch)
                    if delta is not None:
                        yield delta
                    if len(self.job.enough) == len(self.sequences):
                        break
        finally:
            self._ticket.release()
            self._observe_end()

    def _delta(self, batch: Tokens) -> Delta | None:
        """Count a batch and return its text; None where no text is complete."""
        usage, sequence, forced = self.usage, self.sequences[batch.index], self._num_forced
        usage.prompt_tokens = max(usage.prompt_tokens, batch.num_prompt_tokens + self.job.num_encoder_prompt_tokens)
        usage.cached_tokens = max(usage.cached_tokens, batch.num_cached_tokens)
        if batch.prompt_logprobs:
            self.prompt_logprobs = batch.prompt_logprobs
        if sequence.finish_reason is not None:  # a stop string ended the sequence here, and others go on
            return None
        finish, ids, known = batch.finish_reason, batch.token_ids, sequence.detokenizer.num_tokens
        shown = ids[:-1] if finish == "stop" and ids and ids[-1] in self._stops else ids
        text = sequence.detokenizer.push(shown, final=finish is not None)
        if sequence.detokenizer.stopped:
            finish, ids = "stop", ids[: sequence.detokenizer.num_tokens - known]
        usage.completion_tokens -= max(0, len(sequence.token_ids) - forced)
        sequence.token_ids += ids
        usage.completion_tokens += max(0, len(sequence.token_ids) - forced)
        sequence.logprobs += batch.logprobs[: len(ids)]
        if finish is not None:
            sequence.finish_reason = finish
            self.job.enough.add(sequence.index)
        elif not text:
            return None
        begin, sequence.num_emitted = max(forced, sequence.num_emitted), len(sequence.token_ids)
        token_ids, logprobs = tuple(sequence.token_ids[begin:]), tuple(sequence.logprobs[begin:])
        return Delta(text, finish, token_ids, sequence.index, logprobs, batch.score)

    @property
    def text_token_ids(self) -> list[int]:
        """The first sequence's tokens of the answer: without a forced prefix and without the end of sequence."""
        tokens = self.sequences[0].token_ids[self._num_forced :]
        return [token for token in tokens if token not in self._eos_token_ids]

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string or token of the request ended the first sequence, rather than an end of sequence."""
        first = self.sequences[0]
        ended = first.finish_reason == "stop" and not {*first.token_ids[-1:]} & {*self._eos_token_ids}
        return ended or first.detokenizer.stopped

    def _observe_end(self) -> None:
        self._context.prompt_tokens += self.usage.prompt_tokens
        self._context.completion_tokens += self.usage.completion_tokens
        self._metrics.prompt_tokens.inc(self.usage.prompt_tokens)
        self._metrics.generation_tokens.inc(self.usage.completion_tokens)
        longest = max(len(sequence.token_ids) for sequence in self.sequences)
        if self._first_s and longest > 1:
            self._metrics.tpot.observe((time.monotonic() - self._first_s) / (longest - 1))
