"""Pictures of the Qwen-VL models: any size, cut into patches."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from common.messages import InputLayout
from common.model_info import ModelInfo
from engine.media.image import decode_image
from engine.media.patches import PatchSettings, picture_to_patches
from engine.processors import preprocessor_json


class QwenVLProcessor:
    """Pictures of any size to patches, merged squares together; the layout's grid is that of the merged patches."""

    kind = "image"

    def __init__(self, info: ModelInfo) -> None:
        self._settings = PatchSettings.from_json(preprocessor_json(info, "image_processor"))
        vision = info.config["vision_config"]
        num_deepstack = len(vision.get("deepstack_visual_indexes") or ())  # Qwen3-VL's further outputs
        self._width = (1 + num_deepstack) * int(info.text_config["hidden_size"])
        self._token_id = int(info.config["image_token_id"])
        ours = (self._settings.patch_size, self._settings.merge_size)
        tower = (int(vision.get("patch_size", ours[0])), int(vision.get("spatial_merge_size", 2)))
        if ours != tower:
            raise ValueError(
                f"the preprocessor of {info.name} makes patches of {ours[0]} pixels and merges squares of {ours[1]}, "
                f"its encoder takes {tower[0]} and {tower[1]}"
            )

    def __call__(self, media: bytes) -> tuple[dict[str, npt.NDArray[Any]], InputLayout, tuple[int, ...]]:
        patches, (time, height, width) = picture_to_patches(decode_image(media), self._settings)
        merge = self._settings.merge_size
        merged = (time, height // merge, width // merge)
        num_tokens = math.prod(merged)
        arrays = {"pixel_values": patches, "image_grid_thw": np.array((time, height, width))}
        return arrays, InputLayout(num_tokens, [(self._token_id, num_tokens)], merged), (num_tokens, self._width)
