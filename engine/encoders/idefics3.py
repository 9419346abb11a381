"""Idefics3's and SmolVLM's vision tower and connector: transformers' own modules, fed with pieces of many images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModel
from transformers.models.idefics3.modeling_idefics3 import Idefics3Connector

from engine.models.base import CheckpointLayout, EncoderModel
from engine.processors import ProcessedInput

_WIDEST_BYTES: Final = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}
"""Of the widest intermediate tensor: a large image has 17 pieces of 1024 patches, all at once they take 600 MiB, and
a CPU is no faster for it."""


class Idefics3Encoder(EncoderModel):
    """Pieces of all images, stacked. Every piece is a full square, without a mask."""

    layout = CheckpointLayout(prefixes={"model.vision_model.": "vision_model.", "model.connector.": "connector."})

    def __init__(self, config: Any) -> None:
        vision = config.vision_config
        self._tower: Any = AutoModel.from_config(vision)
        self.unmasked = self._tower
        self._connector: Any = Idefics3Connector(config)  # SmolVLM's is the same
        self._patch_size, self._width = int(vision.patch_size), int(vision.intermediate_size)
        self.module: nn.Module = nn.ModuleDict({"vision_model": self._tower, "connector": self._connector})

    def encode(self, items: Sequence[ProcessedInput]) -> list[Tensor]:
        pixels = self.send(np.concatenate([item.arrays["pixel_values"] for item in items]))
        piece_bytes = (pixels.shape[-1] // self._patch_size) ** 2 * self._width * pixels.itemsize
        pieces_at_once = max(1, _WIDEST_BYTES[pixels.device.type] // piece_bytes)
        parts = torch.split(pixels, pieces_at_once)
        features = torch.cat([self._connector(self._tower(part).last_hidden_state) for part in parts])
        outputs = torch.split(features, [len(item.arrays["pixel_values"]) for item in items])
        return [output.flatten(0, 1) for output in outputs]
