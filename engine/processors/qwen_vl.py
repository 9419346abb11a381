"""Images of the Qwen-VL models: any size, cut into patches.

Equal bit for bit to transformers' image processor of Qwen2-VL;
transformers' own would cost every preprocessing process seconds of imports (torch among them).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from common.errors import TriptychError
from common.media.video_rules import fit
from common.messages import InputLayout
from common.model_info import ModelInfo
from engine.media.image import PixelSettings, decode_image, read_pixel_settings
from engine.processors import Prepared


@dataclass(frozen=True)
class PatchSettings(PixelSettings):
    """Sizes in pixels; `merge_size` in patches (per side, to a token) and `temporal_patch_size` in frames."""

    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280

    @classmethod
    def from_json(cls, json: dict[str, Any]) -> PatchSettings:
        """Read a preprocessor_config.json. Raises ValueError if the file turns off a required step."""
        size = json.get("size") or {}
        known = {name: json[name] for name in cls.__dataclass_fields__ if json.get(name) is not None}
        known.setdefault("min_pixels", size.get("shortest_edge", cls.min_pixels))
        known.setdefault("max_pixels", size.get("longest_edge", cls.max_pixels))
        return cls(**{**known, **read_pixel_settings(json)})


def image_to_patches(
    image: Image.Image, settings: PatchSettings
) -> tuple[npt.NDArray[np.float32], tuple[int, int, int]]:
    """Return patches [num_patches, channels * frames * patch_size^2], merged patches adjacent, and the grid (time,
    height, width) before merging.

    Raises TriptychError("bad_media") for an image more than 200 times as long as wide.
    """
    width, height = target_size(image.width, image.height, settings)
    squares = frame_to_squares(np.asarray(image.resize((width, height), settings.resample)), settings)
    patch = settings.patch_size
    rows, columns = height // patch, width // patch
    patches = np.empty((rows * columns, 3, settings.temporal_patch_size, patch * patch), dtype=np.float32)
    for channel, values in enumerate(settings.values):
        patches[:, channel] = values[squares[:, channel]][:, None]  # a still image fills every frame
    return patches.reshape(rows * columns, -1), (1, rows, columns)


def frame_to_squares(pixels: npt.NDArray[np.uint8], settings: PatchSettings) -> npt.NDArray[np.uint8]:
    """Return the patches [num_patches, 3, patch_size^2] of an image [height, width, 3], merged patches adjacent."""
    merge, patch = settings.merge_size, settings.patch_size
    rows, columns = pixels.shape[0] // patch, pixels.shape[1] // patch
    # [rows / m, m, patch, columns / m, m, patch, channel] -> [rows / m, columns / m, m, m, channel, patch, patch]
    squares = pixels.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
    return squares.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3, patch * patch)


def target_size(width: int, height: int, settings: PatchSettings) -> tuple[int, int]:
    """Return the scaled size. Raises TriptychError("bad_media") as `fit` does ValueError."""
    try:
        limits = settings.min_pixels, settings.max_pixels
        return fit(width, height, settings.patch_size * settings.merge_size, limits)
    except ValueError as error:
        raise TriptychError("bad_media", str(error)) from error


class QwenVLProcessor:
    """Images of any size to patches, merged squares together; the layout's grid counts merged patches."""

    kind = "image"

    def __init__(self, info: ModelInfo) -> None:
        self._settings = PatchSettings.from_json(info.preprocessor)
        vision = info.config["vision_config"]
        num_deepstack = len(vision.get("deepstack_visual_indexes") or ())  # Qwen3-VL's further outputs
        self.width = (1 + num_deepstack) * int(info.text_config["hidden_size"])
        self._token_id = int(info.config["image_token_id"])
        ours = (self._settings.patch_size, self._settings.merge_size)
        tower = (int(vision.get("patch_size", ours[0])), int(vision.get("spatial_merge_size", 2)))
        if ours != tower:
            raise ValueError(
                f"the preprocessor of {info.name} makes patches of {ours[0]} pixels and merges squares of {ours[1]}, "
                f"its encoder takes {tower[0]} and {tower[1]}"
            )

    def __call__(self, media: bytes) -> Prepared:
        patches, (time, height, width) = image_to_patches(decode_image(media), self._settings)
        merge = self._settings.merge_size
        merged = (time, height // merge, width // merge)
        num_tokens = math.prod(merged)
        arrays = {"pixel_values": patches, "image_grid_thw": np.array((time, height, width))}
        return arrays, InputLayout(num_tokens, [(self._token_id, num_tokens)], merged), (num_tokens, self.width)
