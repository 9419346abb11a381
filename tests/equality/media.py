"""Pictures, sounds and prompts for the equality tests, equal for equal seeds."""

from __future__ import annotations

import base64
import io
import random
from pathlib import Path

import numpy as np
import numpy.typing as npt
import soundfile
from PIL import Image

from tests.equality.references import SAMPLE_RATE
from tests.media_files import encoded, sound_file

DATA = Path(__file__).parents[1] / "data"
SIZES = ((56, 56), (84, 140), (140, 84), (196, 112), (28, 196), (150, 75))
"""Widths and heights in pixels; the last is no multiple of 28 and is resized."""


def picture(seed: int) -> Image.Image:
    """Noise on a gradient: no two alike, sizes in turn."""
    rng = np.random.default_rng(seed)
    width, height = SIZES[seed % len(SIZES)]
    ramp = np.linspace(0, 160, width)[None, :, None] * rng.random(3)
    noise = rng.integers(0, 96, (height, width, 3))
    return Image.fromarray((ramp + noise).astype(np.uint8))


def data_url(image: Image.Image) -> str:
    return "data:image/png;base64," + base64.b64encode(encoded(image)).decode()


def sound(seed: int) -> npt.NDArray[np.float32]:
    """A few seconds of tones in noise: nothing a person would understand, but no two alike."""
    rng = np.random.default_rng(seed)
    times = np.arange(int(SAMPLE_RATE * (1 + 3 * rng.random()))) / SAMPLE_RATE
    tones = sum(np.sin(2 * np.pi * rng.uniform(80, 2000) * times) for _ in range(4))
    return (0.1 * tones + 0.02 * rng.standard_normal(len(times))).astype(np.float32)


def wav(samples: npt.NDArray[np.float32]) -> bytes:
    """As a lossless float WAV file."""
    return sound_file(samples, SAMPLE_RATE, subtype="FLOAT")


def recording(name: str) -> tuple[bytes, npt.NDArray[np.float32]]:
    """A recording of tests/data: the file's bytes and its samples."""
    media = (DATA / name).read_bytes()
    samples, rate = soundfile.read(io.BytesIO(media), dtype="float32")
    assert rate == SAMPLE_RATE
    return media, samples


def text_prompts(count: int, longest: int = 90) -> list[list[int]]:
    """Prompts of plain byte tokens, from 1 token up; the later ones share a prefix with the first."""
    rng = random.Random(count)
    first = [rng.randrange(32, 127) for _ in range(longest)]
    lengths = [1, longest, *(rng.randrange(2, longest) for _ in range(count))][:count]
    return [
        first[:length] if index % 3 else [rng.randrange(32, 127) for _ in range(length)]
        for index, length in enumerate(lengths)
    ]
