"""Audio: bytes to mono samples at a model's training rate."""

from __future__ import annotations

import io
from typing import Final

import numpy as np
import numpy.typing as npt
import soundfile
import soxr

from common.errors import TriptychError
from common.media import containers

FloatArray = npt.NDArray[np.float32]
_LOUDEST: Final = 1e15
"""Of samples, whose full scale is 1: the power of a spectrum of larger ones is beyond float32."""


def decode_audio(media: bytes, sampling_rate: int, max_seconds: float) -> FloatArray:
    """Mono samples [num_samples] at `sampling_rate` Hz, channels averaged.

    Reads what libsndfile reads (WAV, MP3, FLAC, Ogg, AIFF and others), and the containers of `common.media`. Raises
    TriptychError("bad_media") for anything else, damaged, empty or longer than `max_seconds`; no more than that is ever
    decoded.
    """
    unpack = _read_container if containers.demuxer(media[: containers.HEAD_BYTES]) else _read_file
    samples, own_rate, lasts_s = unpack(media, max_seconds)
    if len(samples) > int(max_seconds * own_rate):
        message = f"the clip is {lasts_s:.2f} s long; at most {max_seconds:g} s are accepted"
        raise TriptychError("bad_media", message)
    if len(samples) == 0:
        raise TriptychError("bad_media", "the sound has no samples")
    mono: FloatArray = samples.mean(axis=1)
    if not (abs(mono) < _LOUDEST).all():  # nor for NaN
        raise TriptychError("bad_media", f"the sound has samples that are not finite, or beyond {_LOUDEST:g}")
    return mono if own_rate == sampling_rate else soxr.resample(mono, own_rate, sampling_rate)


def _read_file(media: bytes, max_seconds: float) -> tuple[FloatArray, int, float]:
    """Return up to a sample more than `max_seconds` [num_samples, channels], their rate, and the length in seconds."""
    try:
        with soundfile.SoundFile(io.BytesIO(media)) as file:
            rate = int(file.samplerate)
            containers.check_sound(rate, file.channels, "the sound")
            samples: FloatArray = file.read(int(max_seconds * rate) + 1, dtype="float32", always_2d=True)
            return samples, rate, max(file.frames, len(samples)) / rate
    except (soundfile.SoundFileError, OSError, ValueError) as error:
        why = getattr(error, "error_string", error)
        accepted = f"WAV, MP3, FLAC, Ogg, AIFF, {containers.FORMATS} are accepted"
        message = f"the sound ({len(media)} bytes) cannot be decoded; {accepted}: {why}"
        raise TriptychError("bad_media", message) from error


def _read_container(media: bytes, max_seconds: float) -> tuple[FloatArray, int, float]:
    """Return as `_read_file` does, from a container."""
    with containers.opened(media, "the sound") as container:
        sound = containers.Sound(container, "the sound")
        blocks, count, limit = list[FloatArray](), 0, int(max_seconds * sound.rate) + 1
        for block in sound.blocks():
            blocks.append(block.mean(axis=1, keepdims=True))
            count += len(block)
            if count >= limit:
                break
    samples = np.concatenate(blocks)[:limit] if blocks else np.zeros((0, 1), np.float32)
    return samples, sound.rate, max(sound.duration_s or 0.0, len(samples) / sound.rate)
