"""Reported log-probabilities: of the model's own logits, before temperature, penalties and masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from common.messages import TokenLogprob
from engine.device.h2d import send


class Measured(NamedTuple):
    """Log-probabilities of tokens, `token_ids` [num_rows], on the device of the logits. The others: `logprobs` and
    `ranks` [num_rows], `top_ids` and `top_logprobs` [num_rows, num_top], likeliest first."""

    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


def measure(logits: Tensor, token_ids: Tensor, num_top: int) -> Measured:
    """Compute the log-softmax of token_ids[i] in row i of logits [num_rows, vocab_size], without waiting.

    The rank is one more than the number of tokens that are likelier: 1 for the likeliest, also where it is not alone.
    """
    normaliser = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, token_ids[:, None])
    ranks = (logits > chosen).sum(dim=-1) + 1
    top = logits.topk(min(num_top, logits.shape[-1]))
    return Measured(token_ids, (chosen - normaliser).squeeze(1), ranks, top.indices, top.values - normaliser)


def describe(measured: Sequence[list[Any]], counts: Sequence[int]) -> list[TokenLogprob]:
    """Return the values of a `Measured` row by row, with the counts[i] likeliest tokens."""
    return [
        TokenLogprob(token, logprob, rank, list(zip(top_ids, top_logprobs, strict=True))[:count])
        for token, logprob, rank, top_ids, top_logprobs, count in zip(*measured, counts, strict=True)
    ]


def describe_tokens(logits: Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprob]:
    """Natural log-softmax of token_ids[i] in row i of logits [num_rows, vocab_size], with the counts[i] likeliest."""
    if not token_ids:
        return []
    [ids] = send(logits.device, np.array(token_ids, np.int64))
    return describe([one.tolist() for one in measure(logits, ids, max(counts))], counts)
