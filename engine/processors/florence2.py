"""Inputs of Florence-2: an image of one size, and the token ids of the text beside it."""

from __future__ import annotations

from typing import Final

import numpy as np

from common.messages import InputLayout
from common.model_info import ModelInfo
from common.text.prompts import check_encoder_prompt, split_media
from engine.media.image import decode_image
from engine.processors import Arrays, Prepared
from engine.processors.llava import CropSettings, image_to_square

_STAGES: Final = {"patch_size": (7, 3, 3, 3), "patch_stride": (4, 2, 2, 2), "patch_padding": (3, 1, 1, 1)}
"""Of the convolutions of DaViT; transformers' defaults."""


class Florence2Processor:
    """A media item as `join_media` makes it. The placeholder in the text becomes one token per row of the image: the
    mean of all patches, and a row per patch."""

    kind = "image"

    def __init__(self, info: ModelInfo) -> None:
        self._info = info
        self._settings = CropSettings.from_json(info.preprocessor)
        self._width = int(info.text_config["d_model"])
        stages = [info.config["vision_config"].get(name) or default for name, default in _STAGES.items()]
        height, width = self._settings.output_size
        for patch, stride, padding in zip(*stages, strict=True):
            height, width = ((side + 2 * padding - patch) // stride + 1 for side in (height, width))
        self._num_rows = height * width + 1

    def __call__(self, media: bytes) -> Prepared:
        given, image = split_media(media)
        placeholder = self._info.placeholder_token_id
        token_ids = [token for one in given for token in [one] * (self._num_rows if one == placeholder else 1)]
        check_encoder_prompt(self._info, token_ids)
        pixels = image_to_square(decode_image(image), self._settings)
        arrays: Arrays = {"pixel_values": pixels, "input_ids": np.asarray(token_ids, np.int64)}
        return arrays, InputLayout(len(token_ids), [], None), (len(token_ids), self._width)
