"""Media files made on the spot."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt
import soundfile
from PIL import Image


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def tone(seconds: float, rate: int = 16000, channels: int = 1) -> npt.NDArray[np.float32]:
    """[num_samples, channels]: one pitch, each channel of another loudness."""
    times = np.arange(round(seconds * rate)) / rate
    wave = np.sin(2 * np.pi * 440 * times)[:, None] * np.linspace(0.1, 0.5, channels)
    return wave.astype(np.float32)


def sound_file(samples: npt.NDArray[np.float32], rate: int = 16000, format: str = "WAV", **options: Any) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=format, **options)
    return buffer.getvalue()
