"""Images of Gemma 3: scaled to one square size, with the same number of tokens each.

Equal bit for bit to transformers' image processor, without its crops of long images ("pan and scan"), which is off in
published folders.
"""

from __future__ import annotations

from PIL import Image

from common.model_info import ModelInfo
from engine.processors.llava import CropSettings, FixedSizeImages


class Gemma3Processor(FixedSizeImages):
    """The placeholder becomes `mm_tokens_per_image` tokens."""

    def __init__(self, info: ModelInfo) -> None:
        json = info.preprocessor
        if json.get("do_pan_and_scan"):
            raise ValueError("do_pan_and_scan is not supported: set it to false")
        json = {"resample": Image.Resampling.BILINEAR, **json, "image_processor_type": "SiglipImageProcessor"}
        super().__init__(info, CropSettings.from_json(json), int(info.config.get("mm_tokens_per_image") or 256))
