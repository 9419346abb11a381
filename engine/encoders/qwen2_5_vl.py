"""Qwen2.5-VL's vision tower: transformers' own module, fed with the pictures of many requests at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from engine.counters import encoder_computations
from engine.models.base import CheckpointLayout, EncoderModel, own_memory
from engine.processors import ProcessedInput


class Qwen2_5_VLEncoder(EncoderModel):
    """Pictures of any sizes laid end to end; the tower attends within each (and within its windows) by itself."""

    layout = CheckpointLayout(prefixes={"visual.": "", "model.visual.": ""})

    def __init__(self, config: Any) -> None:
        self._config = config.vision_config
        self.module: nn.Module = Qwen2_5_VisionTransformerPretrainedModel(self._config)
        self._merge_unit = self._config.spatial_merge_size**2

    def finish_loading(self, device: torch.device) -> None:
        # Its rotary frequencies are in no checkpoint: computed anew, on real memory.
        with torch.device("cpu"):
            rotary = type(self.module.get_submodule("rotary_pos_emb"))(self._config)
        self.module.register_module("rotary_pos_emb", rotary.to(device))

    @torch.inference_mode()
    def encode(self, items: Sequence[ProcessedInput]) -> list[Tensor]:
        encoder_computations.add(len(items))
        weight = next(self.module.parameters())
        pixels = np.concatenate([item.arrays["pixel_values"] for item in items])
        grids = np.stack([item.arrays["image_grid_thw"] for item in items])
        output = self.module(
            torch.from_numpy(pixels).to(weight.device, weight.dtype), grid_thw=torch.from_numpy(grids).to(weight.device)
        )
        merged = torch.split(output.pooler_output, (grids.prod(-1) // self._merge_unit).tolist())
        return own_memory(merged)
