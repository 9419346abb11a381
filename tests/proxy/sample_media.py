"""Small media files, made on the spot."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from PIL import Image

from tests.media_files import encoded, sound_file


def picture(colour: str = "red") -> bytes:
    return encoded(Image.new("RGB", (32, 32), colour))


def speech(seconds: float, rate: int = 8000, channels: int = 1) -> bytes:
    """A WAV file: noise with a quiet tenth of a second every four seconds."""
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, int(seconds * rate)).astype(np.float32)
    for quiet in np.arange(2.0, seconds, 4.0):
        noise[int(quiet * rate) : int((quiet + 0.1) * rate)] = 0
    return sound_file(np.repeat(noise[:, None], channels, axis=1), rate, subtype="PCM_16")


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image_part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def audio_part(data: bytes, form: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": form}}
