"""Long recordings, cut where it is quiet into windows that a speech encoder takes. Numpy only, no resampling.

Runs in processes of its own (`proxy.media.audio_windows`): what is decoded here came from a stranger.

|----------- window, at most 30 s -----------|
|                              |== searched ==|
0                              25      ^cut   30     the quietest tenth of a second of the last five seconds
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import soundfile

from common.audio_limits import MAX_CHANNELS, SAMPLING_RATES
from common.errors import TriptychError

MAX_AUDIO_S: Final = 2 * 3600.0
SEARCH_S: Final = 5.0
_HOPS_PER_S: Final = 50
_QUIET_HOPS: Final = 5
_UNKNOWN: Final = 2**62
"""libsndfile says so many frames, or more, where the header does not tell."""
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Window:
    """A part of a recording, in frames of its own sample rate."""

    start: int
    end: int
    sample_rate: int

    @property
    def start_s(self) -> float:
        return self.start / self.sample_rate

    @property
    def end_s(self) -> float:
        return self.end / self.sample_rate

    @property
    def size_bytes(self) -> int:
        """As `cut` writes it, but for a header."""
        return 2 * (self.end - self.start)


def split(path: str, window_s: float, param: str) -> list[Window]:
    """The windows of a recording: one if it is not longer than `window_s`.

    Raises TriptychError("bad_media") for what cannot be decoded or is empty, ("item_too_large") over MAX_AUDIO_S.
    """
    with _open(path, param) as file:
        rate, frames = file.samplerate, file.frames
        _check_duration(frames / rate, param)
        if 0 < frames <= window_s * rate:
            return [Window(0, frames, rate)]
        energies, total = _energies(file, param)
    if total == 0:
        raise TriptychError("bad_media", f"{param} has no samples", param)
    hop = rate // _HOPS_PER_S
    starts = [0]
    while total - starts[-1] > window_s * rate:
        starts.append(_cut_after(starts[-1], energies, hop, rate, window_s))
    return [Window(start, end, rate) for start, end in zip(starts, [*starts[1:], total], strict=True)]


def cut(path: str, window: Window, param: str) -> bytes:
    """One window as a 16-bit mono WAV file. Raises TriptychError("bad_media") for what cannot be decoded."""
    with _open(path, param) as file:
        file.seek(window.start)
        blocks = file.blocks(
            blocksize=file.samplerate, frames=window.end - window.start, dtype="float32", always_2d=True
        )
        samples = np.concatenate([np.zeros(0, np.float32), *(block.mean(axis=1) for block in blocks)])
    out = io.BytesIO()
    soundfile.write(out, samples, window.sample_rate, format="WAV", subtype="PCM_16")
    return out.getvalue()


def _cut_after(start: int, energies: FloatArray, hop: int, rate: int, window_s: float) -> int:
    """The frame of the quietest point in the last SEARCH_S seconds of the window that begins at `start`."""
    last = (start + int(window_s * rate)) // hop
    first = max(start // hop + 1, last - int(SEARCH_S * _HOPS_PER_S))
    quiet = np.convolve(energies[first:last], np.ones(_QUIET_HOPS), mode="valid")
    return (first + int(quiet.argmin()) + _QUIET_HOPS // 2) * hop


def _energies(file: soundfile.SoundFile, param: str) -> tuple[FloatArray, int]:
    """Mean square of every hop (a fiftieth of a second), and the frames that there really are."""
    hop = file.samplerate // _HOPS_PER_S
    parts: list[FloatArray] = []
    total = 0
    for block in file.blocks(blocksize=hop * _HOPS_PER_S * 10, dtype="float32", always_2d=True):
        mono = block.mean(axis=1)
        total += len(mono)
        _check_duration(total / file.samplerate, param)
        whole = len(mono) // hop * hop
        parts.append(np.square(mono[:whole]).reshape(-1, hop).mean(axis=1))
    return (np.concatenate(parts) if parts else np.zeros(0, np.float32)), total


def _check_header(file: soundfile.SoundFile, param: str) -> None:
    """Some seconds of sound are decoded at once: a header could make them gigabytes."""
    lowest, highest = SAMPLING_RATES
    if not lowest <= file.samplerate <= highest:
        message = f"{param} has a sampling rate of {file.samplerate} Hz; {lowest} to {highest} are accepted"
        raise TriptychError("bad_media", message, param)
    if file.channels > MAX_CHANNELS:
        message = f"{param} has {file.channels} channels; at most {MAX_CHANNELS} are accepted"
        raise TriptychError("bad_media", message, param)
    if file.frames >= _UNKNOWN:
        message = f"{param} does not tell in its header how long it is: let the recorder write to a file, not to a pipe"
        raise TriptychError("bad_media", message, param)


def _check_duration(duration_s: float, param: str) -> None:
    if duration_s > MAX_AUDIO_S:
        message = f"{param} lasts {duration_s:.0f} s, at most {MAX_AUDIO_S:.0f} s are transcribed in one request"
        raise TriptychError("item_too_large", message, param)


@contextmanager
def _open(path: str, param: str) -> Iterator[soundfile.SoundFile]:
    try:
        with soundfile.SoundFile(path) as file:
            _check_header(file, param)
            yield file
    except soundfile.SoundFileError as error:
        raise TriptychError("bad_media", f"{param} cannot be decoded as audio: {error}", param) from error
