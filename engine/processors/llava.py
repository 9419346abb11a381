"""Pictures of LLaVA-1.5 and its relatives: cropped to one square, as many tokens for every one."""

from __future__ import annotations

from typing import Any, Final

import numpy.typing as npt

from common.messages import InputLayout
from common.model_info import ModelInfo
from engine.media.crop import CropSettings, picture_to_square
from engine.media.image import decode_image
from engine.processors import preprocessor_json

CLASS_TOKENS: Final = {"clip_vision_model": 1, "siglip_vision_model": 0}
"""Vision towers, and the rows that each puts before those of the patches."""


class LlavaProcessor:
    """Pictures to pixels of one size; the placeholder becomes one token per row of the projected features."""

    kind = "image"

    def __init__(self, info: ModelInfo) -> None:
        self._settings = CropSettings.from_json(preprocessor_json(info, "image_processor"))
        vision = info.config["vision_config"]
        tower = str(vision.get("model_type", "clip_vision_model"))
        if tower not in CLASS_TOKENS:
            raise ValueError(f"vision tower {tower!r} is not supported; supported: {', '.join(CLASS_TOKENS)}")
        height, width = self._settings.output_size
        image_size, patch_size = int(vision["image_size"]), int(vision["patch_size"])
        if (height, width) != (image_size, image_size):
            raise ValueError(
                f"the preprocessor of {info.name} makes pictures of {width} x {height} pixels, "
                f"its encoder takes {image_size} x {image_size}"
            )
        cropped = info.config.get("vision_feature_select_strategy", "default") == "default"
        num_tokens = (image_size // patch_size) ** 2 + CLASS_TOKENS[tower] - cropped
        self._layout = InputLayout(num_tokens, [(int(info.config["image_token_index"]), num_tokens)])
        self._shape = (num_tokens, int(info.text_config["hidden_size"]))

    def __call__(self, media: bytes) -> tuple[dict[str, npt.NDArray[Any]], InputLayout, tuple[int, ...]]:
        pixels = picture_to_square(decode_image(media), self._settings)
        return {"pixel_values": pixels}, self._layout, self._shape
