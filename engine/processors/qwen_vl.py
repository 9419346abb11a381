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
        self._hidden_size = int(info.config["vision_config"]["out_hidden_size"])
        self._token_id = int(info.config["image_token_id"])
        merge_size = int(info.config["vision_config"].get("spatial_merge_size", 2))
        if self._settings.merge_size != merge_size:
            raise ValueError(
                f"the preprocessor of {info.name} merges {self._settings.merge_size} patches, its encoder {merge_size}"
            )

    def __call__(self, media: bytes) -> tuple[dict[str, npt.NDArray[Any]], InputLayout, tuple[int, ...]]:
        patches, (time, height, width) = picture_to_patches(decode_image(media), self._settings)
        merge = self._settings.merge_size
        merged = (time, height // merge, width // merge)
        num_tokens = math.prod(merged)
        arrays = {"pixel_values": patches, "image_grid_thw": np.array((time, height, width))}
        return arrays, InputLayout(num_tokens, [(self._token_id, num_tokens)], merged), (num_tokens, self._hidden_size)
