"""`draw` without waiting for the device: the same tokens, by passes without data-dependent control flow.

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

import torch
from torch import Tensor

from common.sampling_params import SamplingParams
from common.telemetry import get_logger
from engine.sampling.draw import invert, nucleus_weight, rows_of, top_k_weight

log = get_logger()

Nucleus: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(weights [num_rows, vocab_size], top_p float64 [num_rows, 1]) -> the weights, 0 outside of each row's nucleus."""


def draw_on_device(
    scores: Tensor, sampling: Sequence[SamplingParams], uniforms: Sequence[float], nucleus: Nucleus | None = None
) -> Tensor:
    """Return one token id per row of scores [num_rows, vocab_size], int64 [num_rows] on the same device, equal to
    `draw`.

    `nucleus` finds what top-p leaves; if not given, FlashInfer on CUDA where it is installed and runs, else sorting.
    """
    vocab_size = scores.shape[-1]
    weights, ks, ps, min_ps, numbers = rows_of(scores, sampling, uniforms)
    largest_k = max((one.top_k for one in sampling if 0 < one.top_k < vocab_size), default=0)
    if largest_k:
        ordered = weights.topk(largest_k).values
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
    """Compute a nucleus (see Nucleus), equal but for a token at the very edge with sums different in the last bit."""
    from flashinfer.sampling import top_p_renorm_probs

    probabilities = weights / weights.sum(dim=-1, keepdim=True)
    renormed = cast(Tensor, top_p_renorm_probs(probabilities, ps.squeeze(1).float(), is_deterministic=True))
    return torch.where((renormed > 0.0) | (ps >= 1.0), weights, 0.0)


def prepare(device: torch.device) -> None:
    """Compile FlashInfer's sampling kernels ahead: compilation takes up to a minute and may fail, which must not hit
    the first request."""
    if device.type == "cuda":
        _nucleus_for(torch.empty(0, device=device).device)  # with its number, as tensors have it


@cache
def _nucleus_for(device: torch.device) -> Nucleus:
    if device.type != "cuda" or importlib.util.find_spec("flashinfer") is None:
        return nucleus_by_sorting
    return unless_it_fails(nucleus_by_flashinfer, device)


def unless_it_fails(nucleus: Nucleus, device: torch.device) -> Nucleus:
    """Return `nucleus` if the function runs on this device, else the sorting version."""
    try:
        found = nucleus(torch.ones((1, 32), device=device), torch.full((1, 1), 0.5, dtype=torch.float64, device=device))
        found.cpu()  # an error on the device is raised here
    except Exception as error:  # no compiler, no kernels for this GPU: whatever it is, sorting needs none of it
        log.warning("top-p is found by sorting", reason=f"{type(error).__name__}: {error}"[:300])
        return nucleus_by_sorting
    return nucleus
