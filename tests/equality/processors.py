"""transformers' own processors: prompts with one placeholder per picture to a model's inputs, text and pixels."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from PIL import Image
from transformers import (
    Florence2Processor,
    Idefics3Processor,
    LlavaNextProcessor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from common.model_info import ModelInfo
from common.text.processor import TextProcessor

FAMILIES = ("llava", "llava_next", "idefics3", "smolvlm", "mllama")
# From their modules, as AutoImageProcessor is: transformers 5.17 offers none of the three by name where torchvision,
# which they do not use, is missing.
_BY_TYPE: Final[dict[str, type[Any]]] = {
    "Gemma3ImageProcessor": Gemma3ImageProcessorPil,
    "Idefics3ImageProcessor": Idefics3ImageProcessorPil,
    "SmolVLMImageProcessor": SmolVLMImageProcessorPil,
}


def image_processor(folder: Path) -> Any:
    """transformers' image processor of a model folder, on PIL."""
    kind = json.loads((folder / "preprocessor_config.json").read_text()).get("image_processor_type")
    if kind in _BY_TYPE:
        return _BY_TYPE[kind].from_pretrained(folder)
    return AutoImageProcessor.from_pretrained(folder, backend="pil")


def make_processor(info: ModelInfo) -> Any:
    """Florence-2's, LLaVA's or Idefics3's, which is SmolVLM's for pictures too; of Mllama's the part for pictures."""
    images = image_processor(info.folder)
    if info.family.name == "mllama":
        return images
    tokenizer = PreTrainedTokenizerFast.from_pretrained(info.folder)
    if info.family.name == "florence2":
        images.image_seq_length = json.loads((info.folder / "preprocessor_config.json").read_text())["image_seq_length"]
        return Florence2Processor(images, tokenizer)
    if info.family.name in ("idefics3", "smolvlm"):
        settings = json.loads((info.folder / "processor_config.json").read_text())
        return Idefics3Processor(images, tokenizer, settings["image_seq_len"])
    vision, strategy = info.config["vision_config"], info.config["vision_feature_select_strategy"]
    with_class = int(vision["model_type"] == "clip_vision_model")
    make = LlavaNextProcessor if info.family.name == "llava_next" else LlavaProcessor
    return make(images, tokenizer, vision["patch_size"], strategy, num_additional_image_tokens=with_class)


def expand(processor: Any, info: ModelInfo, prompt: Sequence[int], images: Sequence[Image.Image]) -> dict[str, Any]:
    """The inputs of `generate` for one prompt."""
    if info.family.name == "mllama":
        return _with_mask(processor, info, list(prompt), images)
    text = TextProcessor(info).decode(prompt, skip_special_tokens=False)
    inputs = processor(text=text, images=list(images), return_tensors="pt", add_special_tokens=False)
    return {name: value for name, value in inputs.items() if name != "attention_mask" and torch.is_tensor(value)}


def _with_mask(
    processor: Any, info: ModelInfo, prompt: list[int], images: Sequence[Image.Image]
) -> dict[str, torch.Tensor]:
    """Mllama's inputs as its processor puts them together, which would begin every text with a token of its own."""
    pixels = processor(images=[list(images)], return_tensors="pt")
    sparse = [get_cross_attention_token_mask(prompt, info.placeholder_token_id or 0)]
    mask = convert_sparse_cross_attention_mask_to_dense(
        sparse, pixels.pop("num_tiles"), processor.max_image_tiles, len(prompt)
    )
    return {**pixels, "input_ids": torch.tensor([prompt]), "cross_attention_mask": torch.from_numpy(mask)}
