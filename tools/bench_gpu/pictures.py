"""Pictures that nobody has seen before."""

from __future__ import annotations

import io
import secrets

import numpy as np
from PIL import Image


def noise_picture(side: int) -> bytes:
    """A PNG file of `side` x `side` pixels of noise: none is like another, so none is found in a cache."""
    noise = np.random.default_rng(secrets.randbits(64)).integers(0, 256, (side, side, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG", compress_level=1)
    return file.getvalue()
