"""Images: bytes to upright RGB pixels, and pixels to an encoder's input values.

The numbers are rescaled and normalised per channel, rounded where transformers rounds.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from common.errors import TriptychError, words_of

FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "AVIF", "TIFF")
"""Formats that are decoded. PIL knows dozens, some only by old code."""
MAX_PIXELS: Final = 90_000_000


def decode_image(media: bytes) -> Image.Image:
    """Decode the (first) image in `media`: turned by EXIF, transparency laid on white, RGB.

    Raises TriptychError("bad_media") for other formats, damaged files, and images of more than `MAX_PIXELS` pixels,
    which are refused by their header, before anything is decoded.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # MAX_PIXELS decides
            image = Image.open(io.BytesIO(media), formats=FORMATS)
        if image.width * image.height > MAX_PIXELS:
            message = f"the picture has {image.width} x {image.height} pixels, over {MAX_PIXELS}: scale it down"
            raise TriptychError("bad_media", message)
        image.load()
        with contextlib.suppress(Exception):  # damaged EXIF fails in many ways, and the image is good without it
            ImageOps.exif_transpose(image, in_place=True)
        return to_rgb(image)
    except TriptychError:
        raise
    except Image.DecompressionBombError as error:  # at twice PIL's own limit, before there are numbers
        raise TriptychError("bad_media", f"the picture has far over {MAX_PIXELS} pixels: scale it down") from error
    except UnidentifiedImageError as error:
        formats = ", ".join(FORMATS)
        message = f"the picture ({len(media)} bytes) is not in one of the formats {formats}, or its start is damaged"
        raise TriptychError("bad_media", message) from error
    except Exception as error:  # PIL's decoders raise whatever a damaged file makes them stumble over
        message = f"the picture ({len(media)} bytes) cannot be decoded: {words_of(error)}"
        raise TriptychError("bad_media", message) from error


def to_rgb(image: Image.Image) -> Image.Image:
    """Return an image of any mode as RGB, transparency laid on white."""
    if image.mode.startswith("I"):  # 16 bits per pixel, which `convert` would clip at 255
        image = Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).clip(0, 255).astype(np.uint8))
    if "A" in image.getbands() or "transparency" in image.info:
        layer = image if image.mode == "RGBA" else image.convert("RGBA")
        canvas = Image.new("RGB", layer.size, "white")
        canvas.paste(layer, mask=layer.getchannel("A"))
        return canvas
    return image if image.mode == "RGB" else image.convert("RGB")  # no copy: it may be hundreds of megabytes


CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALVES = (0.5, 0.5, 0.5)
"""SigLIP's mean and deviation."""


@dataclass(frozen=True, kw_only=True)
class PixelSettings:
    """How images are resized and pixels become values, by transformers' names."""

    image_mean: tuple[float, ...] = CLIP_MEAN
    image_std: tuple[float, ...] = CLIP_STD
    rescale_factor: float = 1 / 255
    resample: int = Image.Resampling.BICUBIC

    @cached_property
    def values(self) -> npt.NDArray[np.float32]:
        """[3, 256]: the value of each byte of a channel, rounded as in transformers."""
        scaled = (np.arange(256, dtype=np.float64) * self.rescale_factor).astype(np.float32)
        means, stds = (np.array(channels, dtype=np.float32)[:, None] for channels in (self.image_mean, self.image_std))
        values: npt.NDArray[np.float32] = (scaled - means) / stds
        return values


def to_planes(image: Image.Image, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """An RGB image as [3, height, width], through the table `PixelSettings.values`."""
    pixels = np.asarray(image)
    return np.stack([values[channel][pixels[..., channel]] for channel in range(3)])


def read_pixel_settings(json: dict[str, Any]) -> dict[str, Any]:
    """Return what a preprocessor_config.json says of `PixelSettings`. Raises ValueError if the file turns off a
    required step."""
    for step in ("do_resize", "do_rescale", "do_normalize"):
        if json.get(step, True) is False:
            raise ValueError(f"a preprocessor with {step} = false is not supported")
    given = {name: json[name] for name in PixelSettings.__dataclass_fields__ if json.get(name) not in (None, [])}
    return {name: tuple(value) if name.startswith("image_") else value for name, value in given.items()}
