"""Tokens still being chosen by the device, with the log-probabilities of those that report them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from common.errors import ErrorInfo
from common.messages import TokenLogprob
from engine.sampling.logprobs import Measured, describe


class Sampled(NamedTuple):
    """The next token of a sequence.

    `error` says why its request cannot go on: a grammar that has become too complex. `token_id` then means nothing.
    """

    token_id: int
    logprob: TokenLogprob | None = None
    error: ErrorInfo | None = None


class Report(NamedTuple):
    """Log-probabilities of the tokens of some `rows`, with as many of the likeliest as `counts` says."""

    rows: Sequence[int]
    counts: Sequence[int]
    measured: Measured


class PendingTokens:
    """Chosen tokens, `on_device` int64 [num_tokens], and an asynchronous copy on the host.

    The copy goes to pinned memory, on the stream that computes the tokens: nobody waits until `wait` is called. Made
    under the stream that computes them. On a CPU there is nothing to wait for.
    """

    def __init__(self, tokens: Tensor, report: Report | None = None) -> None:
        self.on_device = tokens
        self._report = report
        self._on_host = [tokens] if report is None else [tokens, *report.measured]
        self._copied: torch.cuda.Event | None = None
        if tokens.device.type == "cuda":
            self._on_host = [
                torch.empty(one.shape, dtype=one.dtype, pin_memory=True).copy_(one, non_blocking=True)
                for one in self._on_host
            ]
            self._copied = torch.cuda.current_stream(tokens.device).record_event()

    def wait(self) -> list[Sampled]:
        """Return the tokens after all work queued before them. Raises CUDA's errors of that work."""
        if self._copied is not None:
            self._copied.synchronize()
        tokens, *measured = [one.tolist() for one in self._on_host]
        sampled = [Sampled(token) for token in tokens]
        if self._report is not None:
            for row, logprob in zip(self._report.rows, describe(measured, self._report.counts), strict=True):
                sampled[row] = sampled[row]._replace(logprob=logprob)
        return sampled
