"""Mllama's vision model and projector: transformers' own modules, fed with the images of many requests at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn
from transformers.models.mllama.modeling_mllama import MllamaVisionModel

from engine.device.h2d import send
from engine.models.base import CheckpointLayout, EncoderModel, with_and_without_model
from engine.processors import ProcessedInput


class MllamaEncoder(EncoderModel):
    """Images of up to `max_num_tiles` tiles, padded with black tiles.

    The tiles that an image does not have are computed and sent too: the vision model lets real tiles look at them, and
    the decoder lets the text before the first image do so.
    """

    layout = CheckpointLayout(
        with_and_without_model({"vision_model.": "tower.", "multi_modal_projector.": "projector."})
    )

    def __init__(self, config: Any) -> None:
        self._tower: Any = MllamaVisionModel(config.vision_config)
        self._projector = nn.Linear(config.vision_config.vision_output_dim, config.text_config.hidden_size)
        self.module: nn.Module = nn.ModuleDict({"tower": self._tower, "projector": self._projector})

    def encode(self, items: Sequence[ProcessedInput]) -> list[Tensor]:
        names = "pixel_values", "aspect_ratio_ids", "aspect_ratio_mask"
        pixels, *tiles = (np.stack([item.arrays[name] for item in items]) for name in names)
        values = self.send(pixels)
        ids, present = send(values.device, *tiles)
        states = self._tower(values, aspect_ratio_ids=ids, aspect_ratio_mask=present).last_hidden_state
        # [images, 1, tiles, rows per tile, features] -> [images, rows, hidden_size]
        return list(self._projector(states).flatten(1, 3).unbind(0))
