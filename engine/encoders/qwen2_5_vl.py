"""Qwen2.5-VL's vision tower: transformers' own module, with attention in windows in most of its layers."""

from __future__ import annotations

from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from engine.encoders.qwen_vision import QwenVisionEncoder


class Qwen2_5_VLEncoder(QwenVisionEncoder):
    tower = Qwen2_5_VisionTransformerPretrainedModel
