"""Gemma 3's vision tower and projector: transformers' own modules, fed with the images of many requests at once."""

from __future__ import annotations

from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector

from engine.encoders.llava import LlavaEncoder


class Gemma3Encoder(LlavaEncoder):
    """Images of equal size, stacked: SigLIP, then squares of patches averaged, normed and projected."""

    projector = Gemma3MultiModalProjector

    def _features(self, pixels: Tensor) -> Tensor:
        features: Tensor = self._tower(pixels).last_hidden_state
        return features
