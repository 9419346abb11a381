"""Bytes of a picture to the numbers that an encoder takes: rescaled, then normalised per channel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALVES = (0.5, 0.5, 0.5)
"""SigLIP's mean and deviation."""


def values_of_bytes(mean: Sequence[float], std: Sequence[float], rescale_factor: float) -> npt.NDArray[np.float32]:
    """[3, 256]: what each of the 256 values of a channel becomes, rounded where transformers rounds."""
    scaled = (np.arange(256, dtype=np.float64) * rescale_factor).astype(np.float32)
    means, stds = (np.array(values, dtype=np.float32)[:, None] for values in (mean, std))
    values: npt.NDArray[np.float32] = (scaled - means) / stds
    return values


def to_planes(image: Image.Image, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """An RGB picture as [3, height, width], through the table of `values_of_bytes`."""
    pixels = np.asarray(image)
    return np.stack([values[channel][pixels[..., channel]] for channel in range(3)])
