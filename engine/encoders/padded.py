"""Encoders of token ids: transformers' own modules, fed with the texts of many requests at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from engine.device.counters import encoder_computations
from engine.device.h2d import send
from engine.models.base import own_memory
from engine.processors import ProcessedInput

MAX_PADDING: Final = 1.25
"""Texts share a batch while the longest is at most so many times as long as the shortest: padding costs time."""


@torch.inference_mode()
def encode_texts(module: nn.Module, items: Sequence[ProcessedInput]) -> list[Tensor]:
    """One output [num_tokens, hidden_size] per item, in their order; padding is masked, so company changes nothing."""
    encoder_computations.add(len(items))
    outputs: dict[int, Tensor] = {}
    for batch in batches_by_length([len(item.arrays["input_ids"]) for item in items]):
        outputs |= zip(batch, _encode(module, [items[index] for index in batch]), strict=True)
    return [outputs[index] for index in range(len(items))]


def batches_by_length(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indices of texts that go through the encoder together."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and lengths[index] > MAX_PADDING * lengths[batch[0]]:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _encode(module: nn.Module, items: Sequence[ProcessedInput]) -> list[Tensor]:
    lengths = [len(item.arrays["input_ids"]) for item in items]
    input_ids = np.zeros((len(items), max(lengths)), np.int64)
    mask = np.zeros_like(input_ids)
    for row, (item, length) in enumerate(zip(items, lengths, strict=True)):
        input_ids[row, :length], mask[row, :length] = item.arrays["input_ids"], 1
    ids, attended = send(next(module.parameters()).device, input_ids, mask)
    hidden = module(input_ids=ids, attention_mask=attended).last_hidden_state
    if min(lengths) == max(lengths):
        return own_memory(hidden.unbind(0))
    return [row[:length].clone() for row, length in zip(hidden, lengths, strict=True)]
