"""Images of Mllama (Llama 3.2 Vision): up to four tiles of equal size, and a single prompt token per image.

Equal bit for bit to transformers' image processor of Mllama;
transformers' own would cost every preprocessing process seconds of imports (torch among them).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from common.messages import InputLayout
from common.model_info import ModelInfo
from engine.media.image import HALVES, decode_image, require_steps, to_planes, values_of_bytes
from engine.processors import preprocessor_json


@dataclass(frozen=True)
class TileSettings:
    """`tile_size` is the side of a tile in pixels, `max_tiles` how many tiles an image is cut into at most."""

    tile_size: int = 224
    max_tiles: int = 4
    image_mean: tuple[float, ...] = HALVES
    image_std: tuple[float, ...] = HALVES
    rescale_factor: float = 1 / 255
    resample: int = Image.Resampling.BILINEAR

    @classmethod
    def from_json(cls, json: dict[str, Any]) -> TileSettings:
        """Read a preprocessor_config.json. Raises ValueError if the file turns off a required step."""
        require_steps(json, "do_resize", "do_pad", "do_rescale", "do_normalize")
        size = json.get("size") or {"height": cls.tile_size, "width": cls.tile_size}
        if size.get("height") is None or size["height"] != size.get("width"):
            raise ValueError(f"tiles of {size} are not supported; expected equal height and width")
        known = {name: json[name] for name in ("rescale_factor", "resample") if json.get(name) is not None}
        return cls(
            tile_size=int(size["height"]),
            max_tiles=int(json.get("max_image_tiles") or cls.max_tiles),
            image_mean=tuple(json.get("image_mean") or HALVES),
            image_std=tuple(json.get("image_std") or HALVES),
            **known,
        )

    @property
    def arrangements(self) -> list[tuple[int, int]]:
        """Possible (rows, columns) of tiles; an aspect ratio id is the index in this list, from 1."""
        counts = range(1, self.max_tiles + 1)
        return [(rows, columns) for rows in counts for columns in counts if rows * columns <= self.max_tiles]


def image_to_tiles(image: Image.Image, settings: TileSettings) -> tuple[npt.NDArray[np.float32], tuple[int, int]]:
    """Return tiles [rows * columns, 3, tile_size, tile_size], row by row, and (rows, columns). Unused area is black."""
    rows, columns = arrangement(image.width, image.height, settings)
    side = settings.tile_size
    canvas = Image.new("RGB", (columns * side, rows * side))
    size = fitting_size(image.width, image.height, canvas.width, canvas.height, side)
    canvas.paste(image.resize(size, settings.resample))
    values = values_of_bytes(settings.image_mean, settings.image_std, settings.rescale_factor)
    planes = to_planes(canvas, values).reshape(3, rows, side, columns, side)
    tiles = planes.transpose(1, 3, 0, 2, 4).reshape(rows * columns, 3, side, side)
    return np.ascontiguousarray(tiles), (rows, columns)


def arrangement(width: int, height: int, settings: TileSettings) -> tuple[int, int]:
    """Return (rows, columns) of the canvas with the least enlarging, else the least shrinking; of several the
    smallest."""
    side = settings.tile_size
    scales = {
        (rows, columns): min(rows * side / height, columns * side / width) for rows, columns in settings.arrangements
    }
    enlarging = [scale for scale in scales.values() if scale >= 1]
    chosen = min(enlarging) if enlarging else max(scales.values())
    return min((pair for pair, scale in scales.items() if scale == chosen), key=math.prod)


def fitting_size(width: int, height: int, canvas_width: int, canvas_height: int, side: int) -> tuple[int, int]:
    """Return (width, height) of an image on the canvas, with the aspect kept: the original size, but at least a
    tile."""
    target_width = min(max(width, side), canvas_width)
    target_height = min(max(height, side), canvas_height)
    scale_width, scale_height = target_width / width, target_height / height
    if scale_width < scale_height:
        return target_width, min(math.floor(height * scale_width) or 1, target_height)
    return min(math.floor(width * scale_height) or 1, target_width), target_height


class MllamaProcessor:
    """Images to tiles. The encoder outputs rows for the greatest number of tiles; rows of real tiles come first, the
    only rows visible to later text."""

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
        tiles, pair = image_to_tiles(decode_image(media), self._settings)
        layout = InputLayout(self._num_rows, [(self._token_id, 1)], num_visible_tokens=len(tiles) * self._rows_per_tile)
        aspect_ratio_id = np.array(self._settings.arrangements.index(pair) + 1)
        arrays = {"pixel_values": tiles, "aspect_ratio_ids": aspect_ratio_id}
        return arrays, layout, (self._num_rows, self._hidden_size)
