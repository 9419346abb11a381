"""Florence-2's encoder: DaViT and its projector, then BART's encoder over the rows of the image and the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.models.bart.modeling_bart import BartEncoder
from transformers.models.florence2.modeling_florence2 import (
    Florence2MultiModalProjector,
    Florence2VisionBackbone,
    Florence2VisionPositionalEmbeddingCosine1D,
)

from engine.encoders.text import encode_texts
from engine.models.base import CheckpointLayout, EncoderModel
from engine.processors import ProcessedInput


class Florence2Encoder(EncoderModel):
    """Images of equal size, stacked; then texts with the rows of their images, padded within a batch."""

    layout = CheckpointLayout(
        prefixes={
            "model.vision_tower.": "tower.",
            "model.multi_modal_projector.": "projector.",
            "model.language_model.encoder.": "text.",
            "model.language_model.shared.": "text.embed_tokens.",
            "model.language_model.decoder.embed_tokens.": "text.embed_tokens.",
            "lm_head.weight": "text.embed_tokens.weight",
        },
        ignored=("pos_idx_to_embed",),
    )

    def __init__(self, config: Any) -> None:
        self._config = config
        self._tower: Any = Florence2VisionBackbone(config.vision_config)
        self._projector: Any = Florence2MultiModalProjector(config)
        self._projector.visual_temporal_embed = None  # a table of sines: computed, not loaded
        self._text = self.padded = BartEncoder(config.text_config)
        parts = {"tower": self._tower, "projector": self._projector, "text": self._text}
        self.module: nn.Module = nn.ModuleDict(parts)

    def finish_loading(self, device: torch.device) -> None:
        times = Florence2VisionPositionalEmbeddingCosine1D(self._config)
        self._projector.visual_temporal_embed = times.to(device, next(self.module.parameters()).dtype)

    def encode(self, items: Sequence[ProcessedInput]) -> list[Tensor]:
        pixels = self.send(np.stack([item.arrays["pixel_values"] for item in items]))
        rows = self._projector(self._tower(pixels).last_hidden_state)
        return encode_texts(self._text, items, list(rows), self._config.image_token_id)
