"""transformers' own processors: prompts with one placeholder per picture to a model's inputs, text and pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from transformers import AutoImageProcessor, Idefics3Processor, LlavaProcessor, PreTrainedTokenizerFast

from common.model_info import ModelInfo
from common.text import TextProcessor

FAMILIES = ("llava", "idefics3")


def make_processor(info: ModelInfo) -> Any:
    """LLaVA's or Idefics3's, which is SmolVLM's for pictures too."""
    images = AutoImageProcessor.from_pretrained(info.folder, backend="pil")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(info.folder)
    if info.family.name == "idefics3":
        return Idefics3Processor.from_pretrained(info.folder, image_processor=images, tokenizer=tokenizer)
    vision, strategy = info.config["vision_config"], info.config["vision_feature_select_strategy"]
    with_class = int(vision["model_type"] == "clip_vision_model")
    return LlavaProcessor(images, tokenizer, vision["patch_size"], strategy, num_additional_image_tokens=with_class)


def expand(processor: Any, info: ModelInfo, prompt: Sequence[int], images: Sequence[Image.Image]) -> dict[str, Any]:
    """The inputs of `generate` for one prompt."""
    text = TextProcessor(info).decode(prompt, skip_special_tokens=False)
    inputs = processor(text=text, images=list(images), return_tensors="pt", add_special_tokens=False)
    return {name: value for name, value in inputs.items() if name != "attention_mask" and torch.is_tensor(value)}
