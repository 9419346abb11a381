"""Random choice: top-k, top-p and min-p, and one draw per row that depends on (seed, position) alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from common.sampling_params import SamplingParams

_GAMMA: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1
NUM_CANDIDATES: Final = 256
"""The nucleus is looked for among so many likeliest tokens before a whole row is sorted."""


def draw(scores: torch.Tensor, sampling: Sequence[SamplingParams], uniforms: Sequence[float]) -> list[int]:
    """One token id per row of scores [num_rows, vocab_size], which is left as it was.

    Row i is drawn from softmax(scores / temperature), restricted by its top-k, top-p and min-p in this order, by
    inverting the cumulative distribution at uniforms[i]. A row's outcome does not depend on its neighbours.
    """
    weights = _weights(scores, [params.temperature for params in sampling])
    if any(params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0 for params in sampling):
        _restrict(weights, sampling)
    # In double precision: the tail of a vocabulary is lost where single precision adds it to a sum near 1.
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    targets = torch.tensor(uniforms, dtype=torch.float64, device=scores.device).unsqueeze(1) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, targets, right=True).squeeze(1)
    chosen: list[int] = tokens.clamp_(max=scores.shape[-1] - 1).tolist()  # of NaN, searchsorted finds nothing
    return chosen


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that a sequence draws at `position`.

    SplitMix64 (Steele, Lea and Flood, 2014), a generator whose n-th number is a function of n: nothing has to be
    remembered, so another instance goes on with the same draws. 52 bits, so that uniform * total < total always.
    """
    start = _mix(seed & _MASK)
    return (_mix((start + (position + 1) * _GAMMA) & _MASK) >> 12) * 2.0**-52


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _weights(scores: torch.Tensor, temperatures: Sequence[float]) -> torch.Tensor:
    """softmax(scores / temperature) up to a factor: the likeliest token of each row weighs 1."""
    weights = scores / torch.tensor(temperatures, dtype=scores.dtype, device=scores.device).unsqueeze(1)
    weights -= weights.amax(dim=-1, keepdim=True)
    return weights.exp_()


def _restrict(weights: torch.Tensor, sampling: Sequence[SamplingParams]) -> None:
    """Set the weights outside top-k, top-p and min-p to 0, in place.

    Each restriction is a least weight. Tokens that weigh exactly as much as the last one kept are kept too, so that
    ties, which are common where logits come from bfloat16, are not decided by the order of a sort.
    """
    vocab_size = weights.shape[-1]
    top_k = [params.top_k if 0 < params.top_k < vocab_size else vocab_size for params in sampling]
    limited = [k for k in top_k if k < vocab_size]
    use_top_p = any(params.top_p < 1.0 for params in sampling)
    num_candidates = min(max([*limited, NUM_CANDIDATES if use_top_p else 1]), vocab_size)
    candidates = weights.topk(num_candidates).values
    if limited:
        last = torch.tensor([min(k, num_candidates) - 1 for k in top_k], device=weights.device).unsqueeze(1)
        kept = candidates.gather(1, last)
        kept[[k == vocab_size for k in top_k]] = 0.0
        weights *= weights >= kept
        candidates *= candidates >= kept
    least = torch.tensor([[params.min_p] for params in sampling], dtype=weights.dtype, device=weights.device)
    if use_top_p:
        top_p = torch.tensor([[params.top_p] for params in sampling], dtype=torch.float64, device=weights.device)
        least = torch.maximum(least, _nucleus(weights, candidates, top_p))
    weights *= weights >= least


def _nucleus(weights: torch.Tensor, candidates: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The least weight inside each row's nucleus (Holtzman et al., 2020), [num_rows, 1]; 0 where top_p is 1.

    The nucleus is the shortest head of the sorted tokens that holds at least top_p of the whole weight. candidates
    [num_rows, n] are the n largest weights, sorted: rows whose nucleus is larger are sorted as a whole.
    """
    goal = top_p * weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
    least = _least_before(candidates, goal)
    least[top_p >= 1.0] = 0.0
    is_short = candidates.sum(dim=-1, keepdim=True, dtype=torch.float64) < goal
    beyond = (is_short & (top_p < 1.0)).squeeze(1).nonzero().squeeze(1)
    if len(beyond):
        least[beyond] = _least_before(_sort_descending(weights[beyond]), goal[beyond])
    return least


def _least_before(ordered: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    """The first entry of each sorted row at which the sum of the row reaches the goal, [num_rows, 1]."""
    cumulative = ordered.cumsum(dim=-1, dtype=torch.float64)
    index = torch.searchsorted(cumulative, goal).clamp_(max=ordered.shape[-1] - 1)
    return ordered.gather(1, index)


def _sort_descending(rows: torch.Tensor) -> torch.Tensor:
    if rows.device.type != "cpu":
        return rows.sort(dim=-1, descending=True).values
    # numpy sorts with vector instructions: a third of torch's time on a CPU.
    return torch.from_numpy(np.sort(rows.numpy(), axis=-1)).flip(-1)
