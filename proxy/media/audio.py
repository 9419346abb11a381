"""Long recordings, cut at quiet points into windows for a speech encoder. Numpy only, no resampling.

The data are untrusted and decoded in helper processes: a crash there does not end the proxy.

|----------- window, at most 30 s -----------|
|                              |== searched ==|
0                              25      ^cut   30     the quietest tenth of a second of the last five seconds
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import soundfile

from common.errors import TriptychError
from common.media import containers
from common.process import malloc
from common.process.child_pool import ChildPool
from proxy.media.helper_process import naming
from proxy.media.voice import VoiceOptions, regions

MAX_AUDIO_S: Final = 2 * 3600.0
SEARCH_S: Final = 5.0
NUM_PROCESSES: Final = 2
TIMEOUT_S: Final = 120.0
"""Two hours of audio are decoded in a fraction of this."""
MEMORY_BYTES: Final = 512 * 2**20
"""Enough for blocks of seconds."""
_HOPS_PER_S: Final = 50
_QUIET_HOPS: Final = 5
_UNKNOWN: Final = 2**62
"""Number of frames, or more, by which libsndfile reports an unknown length."""
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Window:
    """Part of a recording, in frames of the recording's sample rate."""

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
        """Size written by `cut`, without the header."""
        return 2 * (self.end - self.start)


class Division(NamedTuple):
    """The windows of a recording, and its length."""

    windows: list[Window]
    duration_s: float


class AudioWindows(ChildPool):
    """Pool of helper processes that decode audio."""

    def __init__(self, on_crash: Callable[[], object] = lambda: None) -> None:
        """`on_crash` is called on the loop when a helper has died or exceeded TIMEOUT_S."""
        super().__init__(
            malloc.map_large_blocks,
            work="decoding",
            num_workers=NUM_PROCESSES,
            timeout_s=TIMEOUT_S,
            memory_bytes=MEMORY_BYTES,
            on_crash=on_crash,
        )

    async def split(self, path: str, window_s: float, param: str, voice: VoiceOptions | None = None) -> Division:
        """Run `split`; also raises as `run` does, naming `param`."""
        with naming(param):
            return await self.run(param, split, path, window_s, param, voice)

    async def cut(self, path: str, window: Window, param: str) -> bytes:
        """Run `cut`; also raises as `run` does, naming `param`."""
        with naming(param):
            return await self.run(param, cut, path, window, param)


def split(path: str, window_s: float, param: str, voice: VoiceOptions | None = None) -> Division:
    """Return the windows of a recording; a recording of at most `window_s` is a single window.

    With `voice`, windows hold speech only, and there may be none.
    Raises TriptychError("bad_media") for undecodable or empty data, ("item_too_large") over MAX_AUDIO_S.
    """
    with _open(path, param) as recording:
        rate, frames = recording.rate, recording.num_frames
        _check_duration(frames / rate, param)
        if 0 < frames <= window_s * rate and voice is None:
            return Division([Window(0, frames, rate)], frames / rate)
        energies, total = _energies(recording, param)
    if total == 0:
        raise TriptychError("bad_media", f"{param} has no samples", param)
    hop = rate // _HOPS_PER_S
    spans = [(0, total)]
    if voice is not None:
        spans = [(begin * hop, min(end * hop, total)) for begin, end in regions(energies, _HOPS_PER_S, voice)]
    found: list[tuple[int, int]] = []
    for begin, end in spans:
        if found and end - found[-1][0] <= window_s * rate:  # a pause and what follows fit, too
            begin, _ = found.pop()
        while end - begin > window_s * rate:
            middle = _cut_after(begin, energies, hop, rate, window_s)
            found.append((begin, middle))
            begin = middle
        found.append((begin, end))
    return Division([Window(begin, end, rate) for begin, end in found], total / rate)


def cut(path: str, window: Window, param: str) -> bytes:
    """Return a window as a 16-bit mono WAV file. Raises TriptychError("bad_media") for undecodable data."""
    wanted, parts = window.end - window.start, [np.zeros(0, np.float32)]
    with _open(path, param) as recording:
        for block in recording.blocks(window.start):
            parts.append(block.mean(axis=1)[:wanted])
            wanted -= len(parts[-1])
            if wanted == 0:
                break
    samples = np.concatenate(parts)
    out = io.BytesIO()
    soundfile.write(out, samples, window.sample_rate, format="WAV", subtype="PCM_16")
    return out.getvalue()


def _cut_after(start: int, energies: FloatArray, hop: int, rate: int, window_s: float) -> int:
    """Return the frame of the quietest point in the last SEARCH_S seconds of the window from `start`."""
    last = (start + int(window_s * rate)) // hop
    first = max(start // hop + 1, last - int(SEARCH_S * _HOPS_PER_S))
    quiet = np.convolve(energies[first:last], np.ones(_QUIET_HOPS), mode="valid")
    return (first + int(quiet.argmin()) + _QUIET_HOPS // 2) * hop


def _energies(recording: Recording, param: str) -> tuple[FloatArray, int]:
    """Return the mean square of every hop (a fiftieth of a second), and the number of decoded frames."""
    hop = recording.rate // _HOPS_PER_S
    parts, rest = [np.zeros(0, np.float32)], np.zeros(0, np.float32)
    total = 0
    for block in recording.blocks(0):
        mono = np.concatenate([rest, block.mean(axis=1)])
        if not np.isfinite(mono).all():
            raise TriptychError("bad_media", f"{param} has samples that are not finite numbers", param)
        total += len(block)
        _check_duration(total / recording.rate, param)
        whole = len(mono) // hop * hop
        parts.append(np.square(mono[:whole]).reshape(-1, hop).mean(axis=1))
        rest = mono[whole:]
    return np.concatenate(parts), total


def _check_duration(duration_s: float, param: str) -> None:
    if duration_s > MAX_AUDIO_S:
        message = f"{param} lasts {duration_s:.0f} s, at most {MAX_AUDIO_S:.0f} s are transcribed in one request"
        raise TriptychError("item_too_large", message, param)


@dataclass(frozen=True)
class Recording:
    """An open recording. `num_frames` is 0 where only decoding tells the length.

    `blocks` yields samples [some seconds, channels] from a frame on.
    """

    rate: int
    num_frames: int
    blocks: Callable[[int], Iterator[FloatArray]]


@contextmanager
def _open(path: str, param: str) -> Iterator[Recording]:
    with open(path, "rb") as file:
        head = file.read(containers.HEAD_BYTES)
    if containers.demuxer(head) is not None:
        with containers.opened(path, param) as container:
            sound = containers.Sound(container, param)  # whose header may be wrong about the length
            yield Recording(sound.rate, 0, lambda start: sound.blocks(start / sound.rate))
        return
    try:
        with soundfile.SoundFile(path) as file:
            containers.check_sound(file.samplerate, file.channels, param, param)
            if file.frames >= _UNKNOWN:
                hint = "let the recorder write to a file, not to a pipe"
                message = f"{param} does not tell in its header how long it is: {hint}"
                raise TriptychError("bad_media", message, param)

            def blocks(start: int) -> Iterator[FloatArray]:
                file.seek(start)
                while len(block := file.read(10 * file.samplerate, dtype="float32", always_2d=True)):
                    yield block  # `file.blocks` repeats old samples where a cut-off file has no more

            yield Recording(file.samplerate, file.frames, blocks)
    except soundfile.SoundFileError as error:  # whose text has the path in it
        why = getattr(error, "error_string", type(error).__name__)
        raise TriptychError("bad_media", f"{param} cannot be decoded as audio: {why}", param) from error
