"""Random choice: top-k, top-p and min-p, and a draw per row that depends on (seed, position) alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from common.sampling_params import SamplingParams
from engine.device.h2d import send

CANDIDATES: Final = (128, 1024)
"""A row is drawn among so many likeliest tokens where they hold all that may be drawn: first few, then more."""
_BLOCK: Final = 256
_BELOW_ONE: Final = 1.0 - 2.0**-52
_GAMMA: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1


def draw(scores: torch.Tensor, sampling: Sequence[SamplingParams], uniforms: Sequence[float]) -> list[int]:
    """Return one token id per row of scores [num_rows, vocab_size] on the CPU. The scores stay unchanged.

    Row i is drawn from softmax(scores / temperature), restricted by its top-k, top-p and min-p in this order, by
    inverting the cumulative distribution at uniforms[i]. A row's outcome does not depend on its neighbours.
    """
    vocab_size = scores.shape[-1]
    everyone = rows_of(scores, sampling, uniforms)
    top_k = everyone.ks.flatten().tolist()
    tokens = dict.fromkeys(range(len(sampling)), -1)
    # Rows without top-k and top-p need no sorted tokens.
    unordered = [row for row, one in enumerate(sampling) if top_k[row] == 0 and one.top_p >= 1.0]
    if unordered:
        rows = everyone.select(unordered)
        tokens |= zip(unordered, invert(_keep(rows.weights, rows.min_ps), rows.numbers).tolist(), strict=True)
    for size in CANDIDATES:
        left = [row for row, token in tokens.items() if token < 0 and top_k[row] < size < vocab_size]
        if left:
            tokens |= zip(left, _draw_among(size, everyone.select(left)).tolist(), strict=True)
    left = [row for row, token in tokens.items() if token < 0]
    if left:
        rows = everyone.select(left)
        # numpy sorts with vector instructions: a third of torch's time.
        ordered = torch.from_numpy(np.sort(rows.weights.numpy(), axis=-1)).flip(-1)
        least = _least_weight(ordered, rows)
        tokens |= zip(left, invert(_keep(rows.weights, least), rows.numbers).tolist(), strict=True)
    return [min(token, vocab_size - 1) for token in tokens.values()]  # NaN leads beyond the end


def uniform(seed: int, position: int) -> float:
    """Return the random number in [0, 1) of a sequence at `position`.

    SplitMix64 (Steele, Lea and Flood, 2014): the n-th number is a function of n. No state has to be remembered, and
    another instance goes on with the same draws. 52 bits, so that uniform * total < total always.
    """
    start = _mix(seed & _MASK)
    return (_mix((start + (position + 1) * _GAMMA) & _MASK) >> 12) * 2.0**-52


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class Rows(NamedTuple):
    """Rows to draw from: weights [n, vocab_size]; top_k (0: all), top_p, min_p and the uniform numbers, [n, 1] each."""

    weights: torch.Tensor
    ks: torch.Tensor
    ps: torch.Tensor
    min_ps: torch.Tensor
    numbers: torch.Tensor

    def select(self, rows: list[int]) -> Rows:
        """Return some rows, without a copy if all rows are selected."""
        return self if len(rows) == len(self.weights) else Rows(*(tensor[rows] for tensor in self))


def rows_of(scores: torch.Tensor, sampling: Sequence[SamplingParams], uniforms: Sequence[float]) -> Rows:
    """Return rows on the device of the scores, without waiting. Their weights are softmax(scores / temperature) up to a
    factor: the likeliest token of each row weighs 1."""
    vocab_size = scores.shape[-1]
    temperatures, *limits = send(
        scores.device,
        np.array([[params.temperature] for params in sampling], np.float32),
        np.array([[params.top_k if 0 < params.top_k < vocab_size else 0] for params in sampling], np.int64),
        np.array([[params.top_p] for params in sampling], np.float64),
        np.array([[params.min_p] for params in sampling], np.float32),
        np.array(uniforms, np.float64)[:, None],
    )
    weights = scores / temperatures
    weights -= weights.amax(dim=-1, keepdim=True)
    return Rows(weights.exp_(), *limits)


def _keep(weights: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """Weights of less than least [num_rows, 1] become 0."""
    return weights * (weights >= least) if bool(least.any()) else weights


def _draw_among(size: int, rows: Rows) -> torch.Tensor:
    """Draw from the `size` likeliest tokens of each row; [num_rows], -1 if further tokens might be needed.

    The candidates are taken in the order of the vocabulary, as a draw from the whole row takes them.
    """
    ordered, ids = rows.weights.topk(size)
    least, last = _least_weight(ordered, rows), ordered[:, -1:]
    # A least weight of the last candidate may be that of tokens beyond it, too.
    k_is_inside = (rows.ks == 0) | (ordered.gather(1, (rows.ks - 1).clamp(min=0)) > last)
    is_complete = (last == 0.0) | ((least > last) & k_is_inside)
    ids, order = ids.sort(dim=-1)
    cumulative = (ordered * (ordered >= least)).gather(1, order).cumsum(dim=-1, dtype=torch.float64)
    places = torch.searchsorted(cumulative, rows.numbers * cumulative[:, -1:], right=True).clamp_(max=size - 1)
    return torch.where(is_complete, ids.gather(1, places), -1).squeeze(1)


def _least_weight(ordered: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return the least admissible weight of each row, [num_rows, 1]; ordered are the largest weights, sorted.

    Tokens that weigh exactly as much as the last one kept are kept too, so that ties, which are common where logits
    come from bfloat16, are not decided by the order of a sort.
    """
    kept = top_k_weight(ordered, rows.ks)
    head = ordered * (ordered >= kept)
    total = torch.where(rows.ks > 0, head.sum(dim=-1, keepdim=True), rows.weights.sum(dim=-1, keepdim=True))
    return torch.maximum(torch.maximum(kept, nucleus_weight(head, total, rows.ps)), rows.min_ps)


def top_k_weight(ordered: torch.Tensor, ks: torch.Tensor) -> torch.Tensor:
    """The ks-th largest weight of each row, [num_rows, 1]; 0 where ks, int64 [num_rows, 1], is 0."""
    return ordered.gather(1, (ks - 1).clamp(min=0)).masked_fill(ks == 0, 0.0)


def nucleus_weight(head: torch.Tensor, total: torch.Tensor, ps: torch.Tensor) -> torch.Tensor:
    """Return the least weight in the nucleus of each row (Holtzman et al., 2020): the shortest head with at least ps of
    the `total` left by top-k; 0 for ps of 1. All arguments but head, sorted, are [num_rows, 1]."""
    cumulative = head.cumsum(dim=-1, dtype=torch.float64)
    index = torch.searchsorted(cumulative, ps * total).clamp_(max=head.shape[-1] - 1)
    return head.gather(1, index).masked_fill(ps >= 1.0, 0.0)


def invert(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return the token at which each row's running sum passes numbers [num_rows, 1] of the whole, [num_rows].

    In two steps, first the block and then the token in it, and in double precision: single precision would add most
    tokens of an unlikely tail to a sum near 1 without a trace.
    """
    num_rows, vocab_size = weights.shape
    blocks = F.pad(weights, (0, -vocab_size % _BLOCK)).view(num_rows, -1, _BLOCK)
    sums = blocks.sum(dim=-1, dtype=torch.float64)
    ends = sums.cumsum(dim=-1)
    targets = numbers * ends[:, -1:]
    block = torch.searchsorted(ends, targets, right=True).clamp_(max=sums.shape[1] - 1)
    size, end = sums.gather(1, block), ends.gather(1, block)
    inside = blocks.gather(1, block.unsqueeze(2).expand(-1, 1, _BLOCK)).squeeze(1).cumsum(dim=-1, dtype=torch.float64)
    part = ((targets - (end - size)) / size).clamp_(0.0, _BELOW_ONE)
    offset = torch.searchsorted(inside, part * inside[:, -1:], right=True)
    return (block * _BLOCK + offset).squeeze(1)
