"""Audio: bytes to mono samples at a model's training rate."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
import soundfile
import soxr

from common.errors import TriptychError
from common.messages import MAX_CHANNELS, SAMPLING_RATES


def decode_audio(media: bytes, sampling_rate: int, max_seconds: float) -> npt.NDArray[np.float32]:
    """Mono samples [num_samples] at `sampling_rate` Hz, channels averaged.

    Reads what libsndfile reads: WAV, FLAC, Ogg (Vorbis, Opus), MP3 and others. Raises TriptychError("bad_media") for
    anything else, damaged, empty or longer than `max_seconds`; no more than that is ever decoded.
    """
    try:
        with soundfile.SoundFile(io.BytesIO(media)) as file:
            own_rate = _check_header(file)
            limit = int(max_seconds * own_rate)
            samples: npt.NDArray[np.float32] = file.read(limit + 1, dtype="float32", always_2d=True)
            announced = max(file.frames, len(samples))
    except (soundfile.SoundFileError, OSError, ValueError) as error:
        message = f"the sound ({len(media)} bytes) cannot be decoded; WAV, FLAC, Ogg and MP3 are accepted: {error}"
        raise TriptychError("bad_media", message) from error
    if len(samples) > limit:
        message = f"the clip is {announced / own_rate:.2f} s long; at most {max_seconds:g} s are accepted"
        raise TriptychError("bad_media", message)
    if len(samples) == 0:
        raise TriptychError("bad_media", "the sound has no samples")
    mono: npt.NDArray[np.float32] = samples.mean(axis=1)
    if not np.isfinite(mono).all():
        raise TriptychError("bad_media", "the sound has samples that are not finite numbers")
    return mono if own_rate == sampling_rate else soxr.resample(mono, own_rate, sampling_rate)


def _check_header(file: soundfile.SoundFile) -> int:
    lowest, highest = SAMPLING_RATES
    if not lowest <= file.samplerate <= highest:
        message = f"the sound has a sampling rate of {file.samplerate} Hz; {lowest} to {highest} are accepted"
        raise TriptychError("bad_media", message)
    if file.channels > MAX_CHANNELS:
        message = f"the sound has {file.channels} channels; at most {MAX_CHANNELS} are accepted"
        raise TriptychError("bad_media", message)
    return int(file.samplerate)
