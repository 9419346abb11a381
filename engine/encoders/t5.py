"""T5's encoder: transformers' own module."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.t5.modeling_t5 import T5Stack

from engine.encoders.padded import encode_texts
from engine.models.base import CheckpointLayout, EncoderModel
from engine.processors import ProcessedInput


class T5Encoder(EncoderModel):
    """Token ids of T5's encoder prompts, padded where they share a batch."""

    layout = CheckpointLayout(prefixes={"encoder.": "", "shared.": "embed_tokens."})

    def __init__(self, config: Any) -> None:
        stack = copy.deepcopy(config)
        stack.is_decoder = stack.use_cache = False
        self.module: nn.Module = T5Stack(stack)

    def finish_loading(self, device: torch.device) -> None:
        pass

    def encode(self, items: Sequence[ProcessedInput]) -> list[Tensor]:
        return encode_texts(self.module, items)
