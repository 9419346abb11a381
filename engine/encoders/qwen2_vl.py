"""Qwen2-VL's vision tower: transformers' own module."""

from __future__ import annotations

from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from engine.encoders.qwen_vision import QwenVisionEncoder


class Qwen2VLEncoder(QwenVisionEncoder):
    tower = Qwen2VisionTransformerPretrainedModel
