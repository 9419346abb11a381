"""From the tokens of a job to text: detokenising, stop strings, usage, latencies."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal

from common.messages import TokenLogprob, Tokens
from common.text.processor import Detokenizer, TextProcessor
from proxy.dispatch.jobs import Job
from proxy.server.metrics import ProxyMetrics

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Delta:
    """New text of sequence `index` of a job, and what was generated since its delta before; the last one of a sequence
    carries why it ended.

    Tokens and text need not match piece by piece: text is held back while a character or a stop string may go on.
    """

    text: str
    finish_reason: Finish | None = None
    token_ids: tuple[int, ...] = ()
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    score: float | None = None


@dataclass
class Usage:
    """Token counts of a response; they add up over its jobs."""

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
    """One of the texts of a job. `token_ids` holds everything generated so far, special tokens included."""

    index: int
    detokenizer: Detokenizer
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: Finish | None = None
    num_told: int = 0


class TextStream:
    """One job's text. `prompt_logprobs` are there after the first delta, if they were asked for.

    `on_first` is called when the first tokens come.
    """

    def __init__(
        self,
        job: Job,
        text: TextProcessor,
        metrics: ProxyMetrics,
        arrival_s: float,
        *,
        on_first: Callable[[], None] = lambda: None,
        skip_special_tokens: bool = True,
    ) -> None:
        self.job = job
        self.usage = Usage(prompt_tokens=len(job.prompt_token_ids) + job.num_encoder_prompt_tokens)
        self.prompt_logprobs: list[TokenLogprob | None] = []
        sampling = job.sampling
        self.sequences = [
            TextSequence(
                index,
                Detokenizer(
                    text, sampling.stop, skip_special_tokens=skip_special_tokens, min_tokens=sampling.min_tokens
                ),
            )
            for index in range(sampling.n)
        ]
        self._metrics = metrics
        self._arrival_s = arrival_s
        self._first_s = 0.0
        self._on_first = on_first
        self._eos_token_ids = text.info.eos_token_ids

    async def deltas(self, batches: AsyncGenerator[Tokens]) -> AsyncGenerator[Delta]:
        """Text as it becomes known. Ends when every sequence has a finish reason, and closes `batches` then: a stop
        string may be earlier than the worker's own end."""
        try:
            async with aclosing(batches):
                async for batch in batches:
                    self._first_s = self._first_s or self._observe_first()
                    delta = self._take(batch)
                    if delta is not None:
                        yield delta
                    if len(self.job.enough) == len(self.sequences):
                        break
        finally:
            self._observe_end()

    def _take(self, batch: Tokens) -> Delta | None:
        self._count(batch)
        sequence = self.sequences[batch.index]
        if sequence.finish_reason is not None:  # a stop string has ended it here, and the worker goes on for the others
            return None
        sequence.token_ids += batch.token_ids
        sequence.logprobs += batch.logprobs
        self._count_generated()
        finish: Finish | None = "length" if batch.finish_reason == "length" else None
        finish = "stop" if batch.finish_reason in ("stop", "abort") else finish
        text = sequence.detokenizer.push(self._visible(batch), final=finish is not None)
        if sequence.detokenizer.stopped:
            finish = "stop"
        if finish is not None:
            sequence.finish_reason = finish
            self.job.enough.add(sequence.index)
        elif not text:
            return None
        told, sequence.num_told = sequence.num_told, len(sequence.token_ids)
        token_ids, logprobs = tuple(sequence.token_ids[told:]), tuple(sequence.logprobs[told:])
        return Delta(text, finish, token_ids, sequence.index, logprobs, batch.score)

    def _count(self, batch: Tokens) -> None:
        num_prompt_tokens = batch.num_prompt_tokens + self.job.num_encoder_prompt_tokens
        self.usage.prompt_tokens = max(self.usage.prompt_tokens, num_prompt_tokens)
        self.usage.cached_tokens = max(self.usage.cached_tokens, batch.num_cached_tokens)
        if batch.prompt_logprobs:
            self.prompt_logprobs = batch.prompt_logprobs

    def _count_generated(self) -> None:
        num_tokens = sum(len(sequence.token_ids) for sequence in self.sequences)
        forced = sum(min(self._num_forced, len(sequence.token_ids)) for sequence in self.sequences)
        self.usage.completion_tokens = num_tokens - forced

    @property
    def _num_forced(self) -> int:
        """Tokens that the prompt format forced (Whisper's language, task): generated, but not the answer's."""
        return len(self.job.sampling.prefix_allowed)

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the first sequence."""
        return self.sequences[0].token_ids

    @property
    def text_token_ids(self) -> list[int]:
        """The first sequence's tokens of the answer: without a forced prefix and without the end of sequence."""
        return [token for token in self.token_ids[self._num_forced :] if token not in self._eos_token_ids]

    def _visible(self, batch: Tokens) -> list[int]:
        """The tokens of a batch without the one that stopped it, and without timestamps."""
        sampling = self.job.sampling
        stops = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stops |= set(self._eos_token_ids)
        ids = batch.token_ids
        ids = ids[:-1] if batch.finish_reason == "stop" and ids and ids[-1] in stops else ids
        timestamps = sampling.timestamps
        return ids if timestamps is None else [token for token in ids if token < timestamps.first_token_id]

    def _observe_first(self) -> float:
        now_s = time.monotonic()
        self._metrics.ttft.observe(now_s - self._arrival_s)
        self._on_first()
        return now_s

    def _observe_end(self) -> None:
        now_s = time.monotonic()
        self._metrics.latency.observe(now_s - self._arrival_s)
        self._metrics.prompt_tokens.inc(self.usage.prompt_tokens)
        self._metrics.generation_tokens.inc(self.usage.completion_tokens)
        longest = max(len(sequence.token_ids) for sequence in self.sequences)
        if self._first_s and longest > 1:
            self._metrics.tpot.observe((now_s - self._first_s) / (longest - 1))
