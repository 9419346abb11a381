"""When a known text was spoken, from cross-attention: some heads of Whisper look at the sound of the next token.

    queries of the text's tokens, keys of the encoder's frames, of the alignment heads
        -> softmax over the frames that hold sound -> normed over the tokens, smoothed over frames, mean over heads
        -> dynamic time warping: the cheapest path that goes on in both -> the first frame of each token

The method and its constants are openai-whisper's (`timing.py`). Works on the CPU in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from common.model_info import ModelInfo
from engine.state.spec import DecoderSpec

_MEDIAN_WIDTH: Final = 7


def alignment_heads(info: ModelInfo, spec: DecoderSpec) -> list[tuple[int, int]]:
    """Return (layer, head) of the heads that align: the checkpoint's own, else all of the upper half of layers."""
    given = info.generation.get("alignment_heads")
    if given:
        return [(int(layer), int(head)) for layer, head in given]
    return [
        (layer, head)
        for layer in range(spec.num_cross_layers // 2, spec.num_cross_layers)
        for head in range(spec.num_heads)
    ]


def first_frames(queries: Tensor, keys: Tensor, first_row: int) -> list[int]:
    """Return the first frame of each token after row `first_row`: row i looks at the sound of token i + 1.

    queries [num_heads, num_tokens, head_dim] without the last token's, keys [num_heads, num_frames, head_dim].
    """
    scores = queries.float() @ keys.float().transpose(1, 2) / queries.shape[-1] ** 0.5
    weights = scores.softmax(dim=-1)
    deviation, mean = torch.std_mean(weights, dim=1, keepdim=True, unbiased=False)
    weights = (weights - mean) / deviation.clamp_min(1e-9)
    matrix = _median(weights).mean(dim=0)[first_row:]
    return warp(-matrix.double().numpy())


def _median(weights: Tensor) -> Tensor:
    """Take the median of _MEDIAN_WIDTH neighbours along the last dimension, which is mirrored at its ends."""
    side = _MEDIAN_WIDTH // 2
    if weights.shape[-1] <= side:
        return weights
    padded = F.pad(weights, (side, side), mode="reflect")
    return padded.unfold(-1, _MEDIAN_WIDTH, 1).median(dim=-1).values


def warp(cost: npt.NDArray[np.float64]) -> list[int]:
    """Return the column at which the cheapest path through `cost` [rows, columns] enters each row.

    The path steps down, right or both; equal costs go as in openai-whisper: both, then down, then right. Diagonals are
    computed at once: all cells of one depend on the two before it.
    """
    rows, columns = cost.shape
    best = np.full((rows + 1, columns + 1), np.inf)
    step = np.zeros((rows + 1, columns + 1), np.int8)
    best[0, 0] = 0
    for diagonal in range(2, rows + columns + 1):
        row = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        column = diagonal - row
        both, down, right = best[row - 1, column - 1], best[row - 1, column], best[row, column - 1]
        is_both = (both < down) & (both < right)
        is_down = (down < both) & (down < right)
        step[row, column] = np.where(is_both, 0, np.where(is_down, 1, 2))
        best[row, column] = cost[row - 1, column - 1] + np.where(is_both, both, np.where(is_down, down, right))
    step[0, :], step[:, 0] = 2, 1
    entered = [0] * rows
    i, j = rows, columns
    while i > 0 or j > 0:
        if i > 0:
            entered[i - 1] = max(0, int(j) - 1)
        move = step[i, j]
        i, j = i - int(move != 2), j - int(move != 1)
    return entered


def gather_heads(parts: Sequence[dict[int, Tensor]], heads: Sequence[tuple[int, int]]) -> Tensor:
    """Return [num_heads, num_tokens, head_dim] of the pieces of a prompt: by layer [some tokens, heads, head_dim]."""
    return torch.stack([torch.cat([part[layer][:, head] for part in parts]) for layer, head in heads]).cpu()
