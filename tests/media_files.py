"""Media files made on the spot."""

from __future__ import annotations

import io
from typing import Any

import av
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


def container(
    samples: npt.NDArray[np.float32], rate: int = 48000, muxer: str = "mp4", codec: str = "aac", **options: Any
) -> bytes:
    """A recording [num_samples] in a container, as FFmpeg's `muxer` and `codec` write it."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=muxer, options=options) as file:
        stream = file.add_stream(codec, rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
        frame.sample_rate = rate
        coder = stream.codec_context
        resampler = av.AudioResampler(coder.format, "mono", rate, frame_size=coder.frame_size or 1024)
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            file.mux(stream.encode(part))
        file.mux(stream.encode(None))
    return buffer.getvalue()
