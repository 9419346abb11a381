"""`draw` without waiting for the device: the same tokens, by passes that do not depend on what is found on the way.

    weights ── what top-k leaves ── what top-p leaves of that ── min-p ── inversion of the sum at uniforms[i]

On a CPU `draw` looks at few candidates first and at more where they are not enough, which needs an answer in between.
Here the weights are sorted, as far as they have to be; FlashInfer, where it is installed, finds the nucleus without
sorting (its kernels have not run with this module yet).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from common.sampling_params import SamplingParams
from engine.runner.staging import send
from engine.sampling.draw import invert, nucleus_weight, top_k_weight, weights_of

Nucleus: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(weights [num_rows, vocab_size], top_p float64 [num_rows, 1]) -> the weights, 0 outside of each row's nucleus."""


def draw_on_device(
    scores: Tensor, sampling: Sequence[SamplingParams], uniforms: Sequence[float], nucleus: Nucleus | None = None
) -> Tensor:
    """One token id per row of scores [num_rows, vocab_size], int64 [num_rows] on their device: what `draw` gives.

    `nucleus` finds it; if not given, by FlashInfer on CUDA where it is installed, else by sorting.
    """
    vocab_size = scores.shape[-1]
    top_k = np.array([[one.top_k if 0 < one.top_k < vocab_size else 0] for one in sampling], np.int64)
    temperatures, ks, ps, min_ps, numbers = send(
        scores.device,
        np.array([[one.temperature] for one in sampling], np.float32),
        top_k,
        np.array([[one.top_p] for one in sampling], np.float64),
        np.array([[one.min_p] for one in sampling], np.float32),
        np.array(uniforms, np.float64)[:, None],
    )
    weights = weights_of(scores, temperatures)
    if top_k.any():
        ordered = weights.topk(int(top_k.max())).values
        weights = torch.where(weights >= top_k_weight(ordered, ks), weights, 0.0)
    if any(one.top_p < 1.0 for one in sampling):
        weights = (nucleus or _nucleus_for(scores.device))(weights, ps)
    if any(one.min_p > 0.0 for one in sampling):
        weights = torch.where(weights >= min_ps, weights, 0.0)
    return invert(weights, numbers).clamp_(max=vocab_size - 1)


def nucleus_by_sorting(weights: Tensor, ps: Tensor) -> Tensor:
    """See Nucleus."""
    ordered = weights.sort(dim=-1, descending=True).values
    return torch.where(weights >= nucleus_weight(ordered, weights.sum(dim=-1, keepdim=True), ps), weights, 0.0)


def nucleus_by_flashinfer(weights: Tensor, ps: Tensor) -> Tensor:
    """See Nucleus. The same tokens but for one at the very edge, where the sums differ in their last bit."""
    from flashinfer.sampling import top_p_renorm_probs

    probabilities = weights / weights.sum(dim=-1, keepdim=True)
    renormed = cast(Tensor, top_p_renorm_probs(probabilities, ps.squeeze(1).float()))
    return torch.where((renormed > 0.0) | (ps >= 1.0), weights, 0.0)


def _nucleus_for(device: torch.device) -> Nucleus:
    return nucleus_by_flashinfer if device.type == "cuda" and _has_flashinfer() else nucleus_by_sorting


@cache
def _has_flashinfer() -> bool:
    return importlib.util.find_spec("flashinfer") is not None
