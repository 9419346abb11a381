"""From the tokens of a job to text: detokenising, stop strings, usage, latencies."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal

from common.text import Detokenizer, TextProcessor
from proxy.flight import TokenBatch
from proxy.jobs import Job
from proxy.metrics import ProxyMetrics

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Delta:
    """New text of a job, and the tokens generated since the delta before; the last one carries why it ended.

    Tokens and text need not match piece by piece: text is held back while a character or a stop string may go on.
    """

    text: str
    finish_reason: Finish | None = None
    token_ids: tuple[int, ...] = ()


@dataclass
class Usage:
    """Token counts of a response; they add up over its jobs."""

    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, other: Usage) -> None:
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens

    def to_json(self) -> dict[str, Any]:
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }


@dataclass
class Generation:
    """One job's text. `token_ids` holds everything generated so far, special tokens included."""

    job: Job
    text: TextProcessor
    metrics: ProxyMetrics
    arrival_s: float
    usage: Usage = field(default_factory=Usage)
    token_ids: list[int] = field(default_factory=list)

    async def deltas(self, batches: AsyncGenerator[TokenBatch]) -> AsyncGenerator[Delta]:
        """Text as it becomes known. Ends after a delta with a finish reason; a stop string closes `batches`."""
        detokenizer = Detokenizer(self.text, self.job.sampling.stop)
        self.usage.prompt_tokens = len(self.job.prompt_token_ids)
        first_s, num_told = 0.0, 0
        try:
            async with aclosing(batches):
                async for batch in batches:
                    first_s = first_s or self._observe_first()
                    self._count(batch)
                    finish: Finish | None = "length" if batch.finish_reason == "length" else None
                    finish = "stop" if batch.finish_reason in ("stop", "abort") else finish
                    text = detokenizer.push(self._visible(batch), final=finish is not None)
                    if detokenizer.stopped:
                        finish = "stop"
                    if text or finish is not None:
                        fresh, num_told = tuple(self.token_ids[num_told:]), len(self.token_ids)
                        yield Delta(text, finish, fresh)
                    if finish is not None:
                        break
        finally:
            self._observe_end(first_s)

    def _count(self, batch: TokenBatch) -> None:
        self.token_ids += batch.token_ids
        self.usage.completion_tokens = len(self.token_ids) - self._num_forced
        self.usage.prompt_tokens = max(self.usage.prompt_tokens, batch.num_prompt_tokens)

    @property
    def _num_forced(self) -> int:
        """Tokens that the prompt format forced (Whisper's language, task): generated, but not the answer's."""
        return min(len(self.job.sampling.prefix_allowed), len(self.token_ids))

    @property
    def text_token_ids(self) -> list[int]:
        """The tokens of the answer: without a forced prefix and without the end of sequence."""
        ends = self.text.info.eos_token_ids
        return [token for token in self.token_ids[self._num_forced :] if token not in ends]

    def _visible(self, batch: TokenBatch) -> list[int]:
        """The tokens of a batch without the one that stopped it."""
        sampling = self.job.sampling
        stops = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stops |= set(self.text.info.eos_token_ids)
        ids = batch.token_ids
        return ids[:-1] if batch.finish_reason == "stop" and ids and ids[-1] in stops else ids

    def _observe_first(self) -> float:
        now_s = time.time()
        self.metrics.ttft.observe(now_s - self.arrival_s)
        return now_s

    def _observe_end(self, first_s: float) -> None:
        now_s = time.time()
        self.metrics.latency.observe(now_s - self.arrival_s)
        self.metrics.prompt_tokens.inc(self.usage.prompt_tokens)
        self.metrics.generation_tokens.inc(self.usage.completion_tokens)
        if first_s and self.usage.completion_tokens > 1:
            self.metrics.tpot.observe((now_s - first_s) / (self.usage.completion_tokens - 1))
