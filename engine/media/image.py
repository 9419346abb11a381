"""Pictures: bytes to RGB pixels, as a person sees them."""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import Final

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError, WebPImagePlugin  # noqa: F401  (the others load themselves)

from common.errors import TriptychError

FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""What is decoded at all: PIL knows dozens of formats, some of them only by old code."""
MAX_PIXELS: Final = 90_000_000


def decode_image(media: bytes) -> Image.Image:
    """The (first) picture in `media`: turned as its EXIF says, transparency laid on white, RGB.

    Raises TriptychError("bad_media") for other formats, damaged files, and pictures of more than `MAX_PIXELS` pixels,
    which are refused by their header, before anything is decoded.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # `_check_size` decides
            image = Image.open(io.BytesIO(media), formats=FORMATS)
        _check_size(image)
        image.load()
        _turn_upright(image)
        return _to_rgb(image)
    except TriptychError:
        raise
    except UnidentifiedImageError as error:
        formats = ", ".join(FORMATS)
        message = f"the picture ({len(media)} bytes) is not in one of the formats {formats}, or its start is damaged"
        raise TriptychError("bad_media", message) from error
    except Exception as error:  # PIL's decoders raise whatever a damaged file makes them stumble over
        message = f"the picture ({len(media)} bytes) cannot be decoded: {error or type(error).__name__}"
        raise TriptychError("bad_media", message) from error


def _check_size(image: Image.Image) -> None:
    if image.width * image.height > MAX_PIXELS:
        message = f"the picture has {image.width} x {image.height} pixels; at most {MAX_PIXELS} are accepted"
        raise TriptychError("bad_media", message)


def _turn_upright(image: Image.Image) -> None:
    with contextlib.suppress(Exception):  # damaged EXIF fails in many ways, and the picture is good without it
        ImageOps.exif_transpose(image, in_place=True)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits per pixel, which `convert` would clip at 255
        image = Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).clip(0, 255).astype(np.uint8))
    if "A" in image.getbands() or "transparency" in image.info:
        layer = image if image.mode == "RGBA" else image.convert("RGBA")
        canvas = Image.new("RGB", layer.size, "white")
        canvas.paste(layer, mask=layer.getchannel("A"))
        return canvas
    return image if image.mode == "RGB" else image.convert("RGB")  # no copy: it may be hundreds of megabytes
