"""Images of Gemma 3: scaled to one square size, with the same number of tokens each.

Equal bit for bit to transformers' image processor, without its crops of long images ("pan and scan"), which is off in
published folders.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
from PIL import Image

from common.messages import InputLayout
from common.model_info import ModelInfo
from engine.media.image import decode_image
from engine.processors import preprocessor_json
from engine.processors.llava import CropSettings, image_to_square


class Gemma3Processor:
    """Images to pixels of equal size; the placeholder becomes `mm_tokens_per_image` tokens."""

    kind = "image"

    def __init__(self, info: ModelInfo) -> None:
        json = preprocessor_json(info, "image_processor")
        if json.get("do_pan_and_scan"):
            raise ValueError("do_pan_and_scan is not supported: set it to false")
        json = {"resample": Image.Resampling.BILINEAR, **json, "image_processor_type": "SiglipImageProcessor"}
        self._settings = CropSettings.from_json(json)
        side = int(info.config["vision_config"]["image_size"])
        if self._settings.output_size != (side, side):
            height, width = self._settings.output_size
            raise ValueError(f"it makes pictures of {width} x {height} pixels, the encoder takes {side} x {side}")
        num_tokens = int(info.config.get("mm_tokens_per_image") or 256)
        self._layout = InputLayout(num_tokens, [(int(info.config["image_token_index"]), num_tokens)])
        self._shape = (num_tokens, int(info.text_config["hidden_size"]))

    def __call__(self, media: bytes) -> tuple[dict[str, npt.NDArray[Any]], InputLayout, tuple[int, ...]]:
        pixels = image_to_square(decode_image(media), self._settings)
        return {"pixel_values": pixels}, self._layout, self._shape
