"""LLaVA's vision tower and projector: transformers' own modules, fed with the images of many requests at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModel
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

from engine.models.base import CheckpointLayout, EncoderModel, with_and_without_model
from engine.processors import ProcessedInput


class LlavaEncoder(EncoderModel):
    """Images of equal size, stacked: CLIP or SigLIP, then the projection of selected hidden states."""

    projector: type[nn.Module] = LlavaMultiModalProjector
    """transformers' own class."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._tower: Any = AutoModel.from_config(config.vision_config)
        self.unmasked = self._tower
        self._projector = self.projector(config)
        self.module: nn.Module = nn.ModuleDict({"tower": self._tower, "projector": self._projector})
        # There is a level between tower and layers in checkpoints, and in modules of some versions.
        inner = "vision_model." if hasattr(self._tower, "vision_model") else ""
        towers = dict.fromkeys(("vision_tower.", "vision_tower.vision_model."), f"tower.{inner}")
        prefixes = with_and_without_model({**towers, "multi_modal_projector.": "projector."})
        self.layout = CheckpointLayout(prefixes, ignored=("embeddings.position_ids",))

    def finish_loading(self, device: torch.device) -> None:
        # Row numbers 0, 1, ... of its position embedding are in no checkpoint.
        for module in self._tower.modules():
            if "position_ids" in dict(module.named_buffers(recurse=False)):
                module.position_ids = torch.arange(module.position_ids.shape[-1], device=device)[None]

    def encode(self, items: Sequence[ProcessedInput]) -> list[Tensor]:
        pixels = self.send(np.stack([item.arrays["pixel_values"] for item in items]))
        return list(self._projector(self._features(pixels)).unbind(0))

    def _features(self, pixels: Tensor) -> Tensor:
        """Return what the projector reads: [images, 3, height, width] -> [images, rows, width]."""
        layers = self._config.vision_feature_layer
        first_row = 1 if self._config.vision_feature_select_strategy == "default" else 0  # without that of the class
        states = self._tower(pixels, output_hidden_states=True).hidden_states
        return torch.cat([states[n][:, first_row:] for n in ([layers] if isinstance(layers, int) else layers)], dim=-1)
