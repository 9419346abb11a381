"""`flashinfer.sampling`"""

from __future__ import annotations

import torch
from torch import Tensor


def top_p_renorm_probs(probs: Tensor, top_p: Tensor | float, is_deterministic: bool = False) -> Tensor:
    """Zero for all but the likeliest that `top_p` of the probability takes, those equal to the last among them.

    probs [rows, vocab_size], top_p [rows] or one for all
    """
    limits = torch.as_tensor(top_p).expand(len(probs)).unsqueeze(1)
    ordered = probs.sort(dim=-1, descending=True).values
    before = ordered.cumsum(-1) - ordered
    last = torch.where(before < limits, ordered, torch.inf).amin(-1, keepdim=True)
    kept = torch.where(probs >= last, probs, 0.0)
    return kept / kept.sum(-1, keepdim=True)
