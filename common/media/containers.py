"""Containers as phones and browsers record them, opened by PyAV, and their sound as blocks of samples.

The first bytes choose the demuxer; no other is tried, and no other file or address is read. One thread, no hardware.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import av
import av.error
import numpy as np
import numpy.typing as npt
from av.container import InputContainer

from common.errors import TriptychError
from common.messages import MAX_CHANNELS, SAMPLING_RATES

FORMATS: Final = "MP4, M4A, MOV, WebM, Matroska, AAC and MPEG"
HEAD_BYTES: Final = 16
"""Bytes that `demuxer` looks at."""
_MP4: Final = "mov,mp4,m4a,3gp,3g2,mj2"
_ATOMS: Final = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")
"""Begins of MP4, and of QuickTime without `ftyp`."""
PICTURE_BRANDS: Final = {
    b"avif": "avif",
    b"avis": "avif",
    **dict.fromkeys((b"heic", b"heix", b"mif1", b"msf1"), "heic"),
}
"""Major brands of pictures in the same container: iana.org/assignments/media-types (image/avif, image/heic)."""
_MAX_STREAMS: Final = 32
_MARGIN_S: Final = 1.0
"""Decoded and thrown away before a start in the middle: some decoders need samples before the first good one."""
_GAP_S: Final = 0.1
"""Longer steps in the times of a stream are pauses; shorter ones come of rounding."""
FloatArray = npt.NDArray[np.float32]


def demuxer(head: bytes) -> str | None:
    """Return FFmpeg's demuxer for data with these first HEAD_BYTES bytes; None for other data, images included."""
    if head[4:8] in _ATOMS:
        return None if head[4:8] == b"ftyp" and head[8:12] in PICTURE_BRANDS else _MP4
    if head.startswith(b"\x1aE\xdf\xa3"):
        return "matroska,webm"
    if head.startswith(b"\0\0\1\xba"):
        return "mpeg"
    return "aac" if len(head) > 1 and head[0] == 0xFF and head[1] & 0xF6 == 0xF0 else None  # ADTS: layer 0


@contextmanager
def opened(source: str | bytes, what: str) -> Iterator[InputContainer]:
    """Yield the container at a path, or of bytes. `what` names the item in errors, which show no path.

    Raises TriptychError("bad_media") for other formats, too many streams, and damage found here or within the block.
    """
    try:
        with open(source, "rb") if isinstance(source, str) else io.BytesIO(source) as file:
            name = demuxer(file.read(HEAD_BYTES))
            file.seek(0)
            if name is None:
                raise TriptychError("bad_media", f"{what} is no container that can be read here: {FORMATS} are")
            options = {"protocol_whitelist": ""}
            with av.open(file, "r", format=name, options=options, metadata_errors="replace") as container:
                if len(container.streams) > _MAX_STREAMS:
                    message = f"{what} has {len(container.streams)} streams; at most {_MAX_STREAMS} are accepted"
                    raise TriptychError("bad_media", message)
                yield container
    except (av.error.FFmpegError, EOFError, OSError, ValueError) as error:
        raise TriptychError("bad_media", f"{what} cannot be decoded: {_reason(error)}") from error


class Sound:
    """The first audio stream of a container. `duration_s` is the header's, None where it tells none."""

    def __init__(self, container: InputContainer, what: str) -> None:
        """Raises TriptychError("bad_media") without an audio stream, and for rates and channels beyond the limits."""
        streams = container.streams.audio
        if not streams:
            raise TriptychError("bad_media", f"{what} has no audio stream")
        self._container, self._stream, self._what = container, streams[0], what
        self._stream.codec_context.thread_type = "NONE"
        self._stream.codec_context.thread_count = 1
        self.rate = int(self._stream.codec_context.sample_rate or 0)
        if self.rate == 0:
            raise TriptychError("bad_media", f"{what} has no sound that can be decoded")
        check_sound(self.rate, self._stream.codec_context.channels, what)
        lasts = container.duration
        self.duration_s: float | None = None if lasts is None or lasts <= 0 else lasts / av.time_base

    def blocks(self, start_s: float = 0.0) -> Iterator[FloatArray]:
        """Yield samples [about a second, channels] at `rate` from `start_s` on; a pause of the recorder is silence.

        Time counts from the first sample. Raises as the decoder does; call within `opened`.
        """
        first, held, num_held = round(start_s * self.rate), list[FloatArray](), 0
        for position, samples in self._pieces(start_s):
            begin = max(0, first - position)
            if begin < len(samples):
                held.append(samples[begin:])
                num_held += len(samples) - begin
            if num_held >= self.rate:
                yield np.concatenate(held)
                held, num_held = [], 0
        if held:
            yield np.concatenate(held)

    def _pieces(self, start_s: float) -> Iterator[tuple[int, FloatArray]]:
        """Yield samples [up to a second, channels] with the place of the first one, from before `start_s` on."""
        rate, origin_s, position = self.rate, None, 0
        sought = start_s > _MARGIN_S
        if sought:
            origin_s = next((frame.time or 0.0 for frame in self._frames(cut_in=False)), 0.0)
            self._container.seek(int((origin_s + start_s - _MARGIN_S) * av.time_base))
        resampler = av.AudioResampler(format="fltp", rate=rate)
        for frame in self._frames(cut_in=sought):
            check_sound(frame.sample_rate, frame.layout.nb_channels, self._what)
            time_s = frame.time
            origin_s = (time_s or 0.0) if origin_s is None else origin_s
            due = position if time_s is None else max(0, round((time_s - origin_s) * rate))
            position, sought = due if sought else position, False
            while due - position > _GAP_S * rate:
                silence = np.zeros((min(rate, due - position), frame.layout.nb_channels), np.float32)
                yield position, silence
                position += len(silence)
            for part in resampler.resample(frame):
                samples: FloatArray = part.to_ndarray().T.astype(np.float32, copy=False)
                yield position, samples
                position += len(samples)

    def _frames(self, *, cut_in: bool) -> Iterator[av.AudioFrame]:
        """Yield decoded frames. Where the container was `cut_in`, damage before the first frame is a packet's rest."""
        for packet in self._container.demux(self._stream):
            try:
                frames = packet.decode()
            except av.error.InvalidDataError:
                if not cut_in:
                    raise
                continue
            for frame in frames:
                cut_in = False
                yield frame


def check_sound(rate: int, num_channels: int, what: str, param: str | None = None) -> None:
    """Raise TriptychError("bad_media") for rates and channels by which a block of some seconds would take gigabytes."""
    lowest, highest = SAMPLING_RATES
    if not lowest <= rate <= highest:
        message = f"{what} has a sampling rate of {rate} Hz; {lowest} to {highest} are accepted"
        raise TriptychError("bad_media", message, param)
    if not 0 < num_channels <= MAX_CHANNELS:
        message = f"{what} has {num_channels} channels; at most {MAX_CHANNELS} are accepted"
        raise TriptychError("bad_media", message, param)


def _reason(error: Exception) -> str:
    """Return what was wrong without the name of the file, which is a path of this process."""
    return getattr(error, "strerror", None) or type(error).__name__
