"""Reported log-probabilities: of the model's own logits, before temperature, penalties and masks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from common.messages import TokenLogprob
from engine.device.h2d import send


def describe_tokens(logits: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprob]:
    """Natural log-softmax of token_ids[i] in row i of logits [num_rows, vocab_size], with the counts[i] likeliest.

    The rank is one more than the number of tokens that are likelier: 1 for the likeliest, also where it is not alone.
    """
    if not token_ids:
        return []
    normaliser = logits.logsumexp(dim=-1, keepdim=True)
    [ids] = send(logits.device, np.array(token_ids, np.int64)[:, None])
    chosen = logits.gather(1, ids)
    ranks = ((logits > chosen).sum(dim=-1) + 1).tolist()
    logprobs = (chosen - normaliser).squeeze(1).tolist()
    top = logits.topk(min(max(counts), logits.shape[-1]))
    top_ids, top_logprobs = top.indices.tolist(), (top.values - normaliser).tolist()
    return [
        TokenLogprob(token, logprobs[row], ranks[row], list(zip(top_ids[row], top_logprobs[row], strict=True))[:count])
        for row, (token, count) in enumerate(zip(token_ids, counts, strict=True))
    ]
