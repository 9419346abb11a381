"""Images of LLaVA-1.5 and relatives: cropped to a square of fixed size, with a fixed number of tokens.

Equal bit for bit to transformers' CLIP, SigLIP and LLaVA image processors;
transformers' own would cost every preprocessing process seconds of imports (torch among them).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image

from common.errors import TriptychError
from common.messages import InputLayout
from common.model_info import ModelInfo
from engine.media.image import HALVES, PixelSettings, decode_image, read_pixel_settings, to_planes
from engine.processors import Prepared

MAX_RESIZED_PIXELS = 90_000_000
"""The shortest edge is resized to a fixed length: an image of one row would grow without bound."""


@dataclass(frozen=True)
class CropSettings(PixelSettings):
    """Sizes in pixels, (height, width). With `shortest_edge` the aspect is kept, else images are scaled to `size`.

    `square` lays the image on a square of the mean colour first.
    """

    shortest_edge: int | None
    size: tuple[int, int] | None
    crop_size: tuple[int, int] | None
    square: bool = False

    @classmethod
    def from_json(cls, json: dict[str, Any]) -> CropSettings:
        """Read a preprocessor_config.json. Raises ValueError if the file turns off a required step."""
        kind = str(json.get("image_processor_type") or json.get("feature_extractor_type"))
        siglip = kind.startswith("Siglip")
        size = json.get("size") or ({"height": 224, "width": 224} if siglip else 224)
        shortest = size if isinstance(size, int) else None if size.get("longest_edge") else size.get("shortest_edge")
        own = {"image_mean": HALVES, "image_std": HALVES} if siglip else {}
        return cls(
            shortest_edge=shortest,
            size=None if shortest else _pair(size),
            crop_size=_pair(json.get("crop_size") or 224) if json.get("do_center_crop", not siglip) else None,
            square=bool(json.get("do_pad", False)) and kind.startswith("Llava"),
            **(own | read_pixel_settings(json)),
        )

    @property
    def output_size(self) -> tuple[int, int]:
        """Size of every image. Raises ValueError if the size depends on the image."""
        fixed = self.crop_size or self.size
        if fixed is None:
            raise ValueError(
                f"a preprocessor that resizes the shortest edge to {self.shortest_edge} and crops nothing makes "
                "pictures of any size, the encoder takes one size: set do_center_crop and crop_size"
            )
        return fixed


def image_to_square(image: Image.Image, settings: CropSettings) -> npt.NDArray[np.float32]:
    """[3, height, width] of `settings.output_size`.

    Raises TriptychError("bad_media") for an image so long and narrow that resizing it would take all memory.
    """
    if settings.square:
        image = _on_a_square(image, settings.image_mean)
    height, width = settings.size or _scaled_size(image, settings.shortest_edge or 0)
    if height * width > MAX_RESIZED_PIXELS:
        message = f"a picture of {image.width} x {image.height} pixels is too narrow: resized it is {width} x {height}"
        raise TriptychError("bad_media", message)
    image = image.resize((width, height), settings.resample)
    if settings.crop_size is not None:
        height, width = settings.crop_size
        left, top = (image.width - width) // 2, (image.height - height) // 2
        image = image.crop((left, top, left + width, top + height))  # black where the image is smaller
    return to_planes(image, settings.values)


def _on_a_square(image: Image.Image, mean: tuple[float, ...]) -> Image.Image:
    side = max(image.size)
    if image.width == image.height:
        return image
    red, green, blue = (int(value * 255) for value in mean)
    canvas = Image.new("RGB", (side, side), (red, green, blue))
    canvas.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return canvas


def _scaled_size(image: Image.Image, shortest_edge: int) -> tuple[int, int]:
    """(height, width) with the aspect kept, the longer edge rounded down."""
    if image.width <= image.height:
        return int(shortest_edge * image.height / image.width), shortest_edge
    return shortest_edge, int(shortest_edge * image.width / image.height)


def _pair(size: int | dict[str, int]) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    if "height" not in size or "width" not in size:
        raise ValueError(
            f"a preprocessor size of {size} is not supported; supported: shortest_edge, or height and width"
        )
    return int(size["height"]), int(size["width"])


CLASS_TOKENS: Final = {"clip_vision_model": 1, "siglip_vision_model": 0}
"""Vision towers, and the rows that each puts before those of the patches."""


class FixedSizeImages:
    """Images to pixels of equal size; the placeholder becomes a token per row of the projected features."""

    kind = "image"

    def __init__(self, info: ModelInfo, settings: CropSettings, num_tokens: int) -> None:
        self._settings = settings
        (height, width), side = settings.output_size, int(info.config["vision_config"]["image_size"])
        if (height, width) != (side, side):
            raise ValueError(f"it makes pictures of {width} x {height} pixels, the encoder takes {side} x {side}")
        self._layout = InputLayout(num_tokens, [(info.placeholder_token_id or 0, num_tokens)])
        self._shape = (num_tokens, int(info.text_config["hidden_size"]))

    def __call__(self, media: bytes) -> Prepared:
        pixels = image_to_square(decode_image(media), self._settings)
        return {"pixel_values": pixels}, self._layout, self._shape


class LlavaProcessor(FixedSizeImages):
    """A token per patch."""

    def __init__(self, info: ModelInfo) -> None:
        vision = info.config["vision_config"]
        tower = str(vision.get("model_type", "clip_vision_model"))
        if tower not in CLASS_TOKENS:
            raise ValueError(f"vision tower {tower!r} is not supported; supported: {', '.join(CLASS_TOKENS)}")
        cropped = info.config.get("vision_feature_select_strategy", "default") == "default"
        num_patches = (int(vision["image_size"]) // int(vision["patch_size"])) ** 2
        settings = CropSettings.from_json(info.preprocessor)
        super().__init__(info, settings, num_patches + CLASS_TOKENS[tower] - cropped)
