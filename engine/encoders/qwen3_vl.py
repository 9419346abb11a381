"""Qwen3-VL's vision tower: transformers' own module, heard out after several of its layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from engine.encoders.qwen_vision import QwenVisionEncoder


class Qwen3VLEncoder(QwenVisionEncoder):
    """A row is the tower's last output and, behind it, those of the layers in `deepstack_visual_indexes`."""

    tower = Qwen3VLVisionModel

    def rows_of(self, output: Any) -> Tensor:
        return torch.cat((output.pooler_output, *output.deepstack_features), dim=-1)
