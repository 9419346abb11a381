"""LLaVA-NeXT's vision tower and projector: transformers' own modules, fed with the tiles of many images at once."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.models.llava_next.modeling_llava_next import LlavaNextModel, LlavaNextMultiModalProjector

from engine.encoders.llava import LlavaEncoder
from engine.models.base import CheckpointLayout
from engine.processors import ProcessedInput


class LlavaNextEncoder(LlavaEncoder):
    """All tiles of a batch through the tower, then those of each image as lines, which a learned row ends."""

    projector = LlavaNextMultiModalProjector

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.module.register_parameter("image_newline", nn.Parameter(torch.empty(config.text_config.hidden_size)))
        newline = {"image_newline": "image_newline", "model.image_newline": "image_newline"}
        self.layout = CheckpointLayout({**self.layout.prefixes, **newline}, ignored=self.layout.ignored)

    def encode(self, items: Sequence[ProcessedInput]) -> list[Tensor]:
        newline: Any = self.module.image_newline  # the parameter as loaded
        tiles = [item.arrays["pixel_values"] for item in items]
        rows = self._projector(self._features(self.send(np.concatenate(tiles)))).split([len(one) for one in tiles])
        sizes = [item.arrays["image_sizes"] for item in items]
        strategy = self._config.vision_feature_select_strategy
        packed, _ = LlavaNextModel.pack_image_features(
            SimpleNamespace(config=self._config), rows, sizes, strategy, image_newline=newline
        )
        return list(packed)
