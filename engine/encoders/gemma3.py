"""Gemma 3's vision tower and projector: transformers' own modules, fed with the images of many requests at once."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AutoModel
from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector

from engine.encoders.llava import LlavaEncoder, tower_layout


class Gemma3Encoder(LlavaEncoder):
    """Images of equal size, stacked: SigLIP, then squares of patches averaged, normed and projected."""

    def __init__(self, config: Any) -> None:
        self._tower: Any = AutoModel.from_config(config.vision_config)
        self.unmasked = self._tower
        self._projector = Gemma3MultiModalProjector(config)
        self.module: nn.Module = nn.ModuleDict({"tower": self._tower, "projector": self._projector})
        self.layout = tower_layout(self._tower)

    def _features(self, pixels: Tensor) -> Tensor:
        features: Tensor = self._tower(pixels).last_hidden_state
        return features
