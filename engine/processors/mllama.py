"""Pictures of Mllama (Llama 3.2 Vision): cut into up to four tiles, one token in the prompt for each picture."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from common.messages import InputLayout
from common.model_info import ModelInfo
from engine.media.image import decode_image
from engine.media.tiles import TileSettings, picture_to_tiles
from engine.processors import preprocessor_json


class MllamaProcessor:
    """Pictures to tiles. The encoder puts out rows for the greatest number of tiles; those of the tiles that the
    picture has come first and are all that text behind it sees."""

    kind = "image"

    def __init__(self, info: ModelInfo) -> None:
        self._settings = TileSettings.from_json(preprocessor_json(info, "image_processor"))
        vision = info.config["vision_config"]
        ours = (self._settings.tile_size, self._settings.max_tiles)
        theirs = (int(vision.get("image_size", 448)), int(vision.get("max_num_tiles", 4)))
        if ours != theirs:
            raise ValueError(
                f"the preprocessor of {info.name} makes up to {ours[1]} tiles of {ours[0]} pixels, "
                f"its encoder takes {theirs[1]} of {theirs[0]}"
            )
        supported = [tuple(pair) for pair in vision.get("supported_aspect_ratios") or self._settings.arrangements]
        if supported != self._settings.arrangements:
            raise ValueError(
                f"aspect ratios {supported} of {info.name} are not supported; expected {self._settings.arrangements}"
            )
        self._num_rows = info.max_encoder_tokens
        self._rows_per_tile = self._num_rows // self._settings.max_tiles
        self._hidden_size = int(info.text_config["hidden_size"])
        self._token_id = int(info.config["image_token_index"])

    def __call__(self, media: bytes) -> tuple[dict[str, npt.NDArray[Any]], InputLayout, tuple[int, ...]]:
        tiles, pair = picture_to_tiles(decode_image(media), self._settings)
        layout = InputLayout(self._num_rows, [(self._token_id, 1)], num_visible_tokens=len(tiles) * self._rows_per_tile)
        aspect_ratio_id = np.array(self._settings.arrangements.index(pair) + 1)
        arrays = {"pixel_values": tiles, "aspect_ratio_ids": aspect_ratio_id}
        return arrays, layout, (self._num_rows, self._hidden_size)
