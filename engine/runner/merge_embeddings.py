"""Encoder outputs in the place of placeholder tokens' embeddings.

prompt          t t p p p p t t       p: placeholder tokens of one input
step's tokens       └─────┘           a chunk: rows 1 .. 3 of the encoder output, at rows of the batch
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.cache.encoder_cache import EncoderCacheManager
from engine.device.h2d import send, send_tensor
from engine.models.base import EncoderRows
from engine.state.inputs import ScheduledStep, StepInputs
from engine.state.spec import IntArray


@dataclass(frozen=True)
class MergedRows:
    """Encoder rows `outputs` [k, encoder_width] for rows `rows` [k] of the batch."""

    rows: IntArray
    outputs: Tensor


def find_pieces(
    step: ScheduledStep, inputs: StepInputs, cache: EncoderCacheManager, placeholder: int | None
) -> list[MergedRows]:
    """Return the encoder rows of a step: for each input, the rows with a placeholder in the step."""
    pieces = []
    for index, sequence in enumerate(step.sequences):
        first = sequence.num_computed_tokens
        last = first + step.num_tokens[index]
        offset = int(inputs.query_start_loc[index]) - first
        for item in sequence.request.inputs:
            if item.start is None or item.start >= last or item.start + item.num_prompt_tokens <= first:
                continue
            assert item.offer is not None
            places = _placeholders(item.offer.layout.expansion, placeholder) + item.start
            begin, end = np.searchsorted(places, (first, last))
            if begin < end:
                outputs = cache.get(item.offer.content_hash)[begin:end]
                pieces.append(MergedRows(places[begin:end] + offset, outputs))
    return pieces


def splice(embeddings: Tensor, pieces: Sequence[MergedRows], dtype: torch.dtype) -> EncoderRows | None:
    """Put the first columns of each piece into `embeddings` [num_tokens, hidden_size].

    Returns the whole rows where they have more columns than that (Qwen3-VL), None otherwise.
    """
    if not pieces:
        return None
    device, hidden_size = embeddings.device, embeddings.shape[1]
    [rows] = send(device, np.concatenate([piece.rows for piece in pieces]))
    outputs = torch.cat([send_tensor(piece.outputs, device, dtype) for piece in pieces])
    embeddings[rows] = outputs[:, :hidden_size]
    return EncoderRows(rows, outputs) if outputs.shape[1] > hidden_size else None


def _placeholders(expansion: Sequence[tuple[int, int]], placeholder: int | None) -> IntArray:
    """Return the tokens of an expansion with the placeholder's id: encoder rows replace their embeddings."""
    flags = np.concatenate([np.full(count, token_id == placeholder) for token_id, count in expansion])
    return np.flatnonzero(flags)
