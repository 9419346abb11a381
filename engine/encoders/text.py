"""Encoders of token ids, T5's, BART's and mBART's: transformers' own modules, texts of many requests in one batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from transformers.models.bart.modeling_bart import BartEncoder as BartEncoderModule
from transformers.models.mbart.modeling_mbart import MBartEncoder as MBartEncoderModule
from transformers.models.t5.modeling_t5 import T5Stack

from engine.device.h2d import send
from engine.encoders.attention import rows_and_padding
from engine.models.base import CheckpointLayout, EncoderModel
from engine.processors import ProcessedInput

MAX_PADDING: Final = 1.25
"""Texts share a batch while the longest is at most so many times as long as the shortest: padding costs time."""
_TIED: Final = ("model.shared", "shared", "model.decoder.embed_tokens", "decoder.embed_tokens", "lm_head")
"""Names of the embedding beside the encoder's own: a checkpoint may hold any of them alone."""


def encode_texts(
    module: nn.Module, items: Sequence[ProcessedInput], rows: Sequence[Tensor] = (), placeholder: int = -1
) -> list[Tensor]:
    """Return an output [num_tokens, hidden_size] per item, in order. Padding is masked and changes no result.

    `rows` [num_placeholders, hidden_size] of each item take the places of its placeholders' embeddings.
    """
    outputs: dict[int, Tensor] = {}
    for batch in batches_by_length([len(item.arrays["input_ids"]) for item in items]):
        outputs |= zip(batch, _encode(module, items, rows, placeholder, batch), strict=True)
    return [outputs[index] for index in range(len(items))]


def batches_by_length(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Return indices of texts to encode together."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and lengths[index] > MAX_PADDING * lengths[batch[0]]:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _encode(
    module: Any, all_items: Sequence[ProcessedInput], rows: Sequence[Tensor], placeholder: int, batch: Sequence[int]
) -> list[Tensor]:
    items = [all_items[index] for index in batch]
    lengths = [len(item.arrays["input_ids"]) for item in items]
    input_ids = np.zeros((len(items), max(lengths)), np.int64)
    mask = np.zeros_like(input_ids)
    for row, (item, length) in enumerate(zip(items, lengths, strict=True)):
        input_ids[row, :length], mask[row, :length] = item.arrays["input_ids"], 1
    ids, attended = send(next(module.parameters()).device, input_ids, mask)
    told = rows_and_padding(module, lengths, max(lengths))
    embeddings = module.embed_tokens(ids)
    if rows:
        embeddings[ids == placeholder] = torch.cat([rows[index] for index in batch])
    hidden = module(inputs_embeds=embeddings, attention_mask=attended, **told).last_hidden_state
    return [row[:length] for row, length in zip(hidden, lengths, strict=True)]


class TextEncoder(EncoderModel):
    """Token ids of encoder prompts, padded within a batch."""

    layout = CheckpointLayout(
        prefixes={"model.encoder.": "", "encoder.": "", **{f"{name}.weight": "embed_tokens.weight" for name in _TIED}},
        ignored=("encoder.version",),  # written by the first converters
    )

    def encode(self, items: Sequence[ProcessedInput]) -> list[Tensor]:
        return encode_texts(self.module, items)


class T5Encoder(TextEncoder):
    def __init__(self, config: Any) -> None:
        config.is_decoder = config.use_cache = False
        self.module = T5Stack(config)


class BartEncoder(TextEncoder):
    """BART's and mBART's."""

    def __init__(self, config: Any) -> None:
        kind: type[nn.Module] = MBartEncoderModule if config.model_type == "mbart" else BartEncoderModule
        self.module = self.padded = kind(config)
