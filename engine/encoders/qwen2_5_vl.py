"""Qwen2.5-VL's vision tower: transformers' own module, with attention in windows in most of its layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.vision_utils import get_vision_window_index

from engine.device.h2d import send_tensor
from engine.encoders.qwen_vision import QwenVisionEncoder


class Qwen2_5_VLEncoder(QwenVisionEncoder):
    tower = Qwen2_5_VisionTransformerPretrainedModel

    def layout_of(self, sizes: Tensor, device: torch.device) -> dict[str, Any]:
        config = self._config
        order, starts = get_vision_window_index(sizes, config.spatial_merge_size, config.window_size, config.patch_size)
        windows = {
            "window_index": send_tensor(order, device, order.dtype),
            "cu_window_seqlens": starts,
            "max_window_seqlen": int(starts.diff().max()),
        }
        return super().layout_of(sizes, device) | windows
