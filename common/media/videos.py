"""Videos cut into pieces, which encoders decode and encode independently of each other.

A piece holds the sampled frames of some pairs, and the packets needed to decode them, from a key frame on:

    packets         K p p p p p K p p p p p K p p p           K: key frame
    sampled         ^     ^     ^     ^     ^     ^
    pieces          |--- piece 0 ---|--- piece 1 ---|--- …    a pair of frames each; a piece may begin before its first

Nothing is decoded here but a first frame: its size and turn. Call from a limited child only; PyAV demuxes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import av
import msgspec
from av.container import InputContainer
from av.stream import Disposition

from common.errors import TriptychError
from common.media.containers import opened
from common.media.video_rules import VideoRules

PIECE_TOKENS: Final = 4096
"""Of a piece, some 20 MB of bytes of patches; a quarter more to end before a key frame. A single pair may have more."""
MAX_PIECES_BYTES: Final = 256 * 2**20
"""Of all pieces of a video: with few key frames, every piece repeats many packets."""


class VideoPiece(msgspec.Struct, frozen=True):
    """Part of a video as a media item. Frames are numbered in the order of display; `packets` are in decoding order.

    `frames` are the sampled frames, a whole number of pairs. Each is turned by `rotation` degrees, counter-clockwise,
    and scaled to `size`, width and height. `times` are the time positions of the pairs, `seconds` the times in the
    video. `continues`: another piece of the video comes before. `prompt_text` is only in the first piece.
    """

    codec: str
    extradata: bytes
    pixel_format: str
    coded_size: tuple[int, int]
    rotation: int
    size: tuple[int, int]
    frames: list[int]
    times: list[int]
    seconds: list[float]
    packets: list[tuple[int, bytes]]
    continues: bool = False
    prompt_text: str = ""


class _Head(msgspec.Struct, frozen=True):
    prompt_text: str


@dataclass(frozen=True)
class VideoLimits:
    """Limits of a video, each with the name of its setting in messages."""

    max_video_seconds: float = float("inf")
    max_video_frames: int = 2**31
    max_video_pixels: int = 90_000_000
    max_tokens: int = 2**31


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(VideoPiece)
_head_decoder = msgspec.msgpack.Decoder(_Head)


def read_piece(media: bytes) -> VideoPiece:
    """Return the piece in a media item. Raises TriptychError("bad_media") for other bytes."""
    try:
        return _decoder.decode(media)
    except (msgspec.MsgspecError, ValueError) as error:
        raise TriptychError("bad_media", f"not a piece of a video: {error}") from error


def prompt_text(media: bytes) -> str:
    """Return what a prompt has in place of a video, from its first piece as made by `cut`; empty for most models."""
    return _head_decoder.decode(media).prompt_text


def cut(source: str | bytes, rules: VideoRules, limits: VideoLimits, what: str) -> list[bytes]:
    """Return the pieces of the video at a path, or of bytes, in order; `what` names the video in errors.

    Raises TriptychError: "bad_media" for data that is no video, damaged or cut off, "item_too_large" beyond a limit,
    "context_length_exceeded" for more than `max_tokens`.
    """
    with opened(source, what) as container:
        track = _read_track(container, limits, what)
    return _pieces(track, rules, limits, what)


def of_frames(images: Sequence[bytes], size: tuple[int, int], fps: float, rules: VideoRules) -> list[bytes]:
    """Return the pieces of a video given as PNG files of one size, all of which are seen, at `fps` per second."""
    packets = [_Packet(number, True, image) for number, image in enumerate(images)]
    track = _Track("png", b"", "rgb24", size, 0, fps, packets)
    return _pieces(track, replace(rules, do_sample_frames=False), VideoLimits(), "the video")


@dataclass
class _Packet:
    """`number`: of the frame, in the order of display; -1 for a packet whose frame is not shown."""

    number: int
    is_key: bool
    data: bytes


@dataclass
class _Track:
    codec: str
    extradata: bytes
    pixel_format: str
    coded_size: tuple[int, int]
    rotation: int
    fps: float
    packets: list[_Packet] = field(repr=False)

    @property
    def size(self) -> tuple[int, int]:
        """Width and height as shown."""
        width, height = self.coded_size
        return (width, height) if self.rotation % 180 == 0 else (height, width)


def _read_track(container: InputContainer, limits: VideoLimits, what: str) -> _Track:
    """Read all packets of the first video stream, and decode the first frame."""
    stream = next((one for one in container.streams.video if not one.disposition & Disposition.attached_pic), None)
    if stream is None:
        raise TriptychError("bad_media", f"{what} has no video stream")
    context = stream.codec_context
    if context is None:
        raise TriptychError("bad_media", f"{what} is in a codec that is not known here")
    stream.thread_type, context.thread_count = "NONE", 1
    _check_size(context.width, context.height, limits, what)
    _check_seconds((container.duration or 0) / av.time_base, limits, what)
    packets: list[_Packet] = []
    shown_at: list[tuple[int, int]] = []  # time of display and place of each packet that is shown
    first: av.VideoFrame | None = None
    for packet in container.demux(stream):
        if not packet.size or not (packets or packet.is_keyframe):  # the end; or nothing to begin with
            continue
        if packet.pts is None:
            raise TriptychError("bad_media", f"{what} does not tell when its frames are shown: write MP4 or WebM")
        data = bytes(packet)
        if not (packet.is_discard or _is_hidden(context.codec.name, data)):
            shown_at.append((packet.pts, len(packets)))
        packets.append(_Packet(-1, packet.is_keyframe, data))
        if first is None:
            first = next(iter(packet.decode()), None)
    first = first or next(iter(context.decode(None)), None)
    if first is None or not shown_at:
        raise TriptychError("bad_media", f"{what} has no frame that can be decoded")
    announced = min(stream.frames, len(stream.index_entries))  # the index is short of what an edit list leaves out
    if announced > len(packets):
        message = f"{what} is cut off: its header announces {announced} frames, {len(packets)} are there"
        raise TriptychError("bad_media", message)
    shown_at.sort()
    for number, (_, place) in enumerate(shown_at):
        packets[place].number = number
    _check_size(first.width, first.height, limits, what)
    seconds = float((shown_at[-1][0] - shown_at[0][0]) * (stream.time_base or 0))
    _check_seconds(seconds, limits, what)
    mean, rate = (len(shown_at) - 1) / seconds if seconds else 0.0, float(stream.average_rate or 0)
    fps = (rate if 0 < rate < 1.1 * mean else mean) or rate or 24.0  # Matroska's rate may be that of a few frames
    size = first.width, first.height
    return _Track(context.codec.name, context.extradata or b"", first.format.name, size, first.rotation, fps, packets)


def _is_hidden(codec: str, data: bytes) -> bool:
    """Return whether a VP8 packet is only a reference for others (RFC 6386, section 9.1)."""
    return codec in ("vp8", "libvpx") and not data[0] & 0x10


def _check_size(width: int, height: int, limits: VideoLimits, what: str) -> None:
    if width * height > limits.max_video_pixels:
        message = f"{what} has frames of {width} x {height} pixels, at most {limits.max_video_pixels} are accepted"
        raise TriptychError("item_too_large", f"{message} (max_video_pixels)")


def _check_seconds(seconds: float, limits: VideoLimits, what: str) -> None:
    if seconds > limits.max_video_seconds:
        message = f"{what} lasts {seconds:.0f} s, at most {limits.max_video_seconds:g} s are accepted"
        raise TriptychError("item_too_large", f"{message} (max_video_seconds)")


def _pieces(track: _Track, rules: VideoRules, limits: VideoLimits, what: str) -> list[bytes]:
    places = {packet.number: place for place, packet in enumerate(track.packets) if packet.number >= 0}
    numbers = rules.sample(len(places), track.fps)
    if len(numbers) > limits.max_video_frames:
        message = f"the model would see {len(numbers)} frames of {what}, at most {limits.max_video_frames} are accepted"
        raise TriptychError("item_too_large", f"{message} (max_video_frames)")
    try:
        size = rules.frame_size(*track.size, len(numbers))
    except ValueError as error:
        raise TriptychError("bad_media", f"{what} cannot be scaled: {error}") from error
    step = rules.temporal_patch_size
    padded = [*numbers, *[numbers[-1]] * (-len(numbers) % step)]
    pairs = [padded[begin : begin + step] for begin in range(0, len(padded), step)]
    tokens = rules.tokens_of(size)
    if len(pairs) * tokens >= limits.max_tokens:
        message = f"{what} makes {len(pairs) * tokens} tokens of {len(numbers)} frames of {size[0]} x {size[1]} pixels"
        message = f"{message}; the context has {limits.max_tokens}: send a shorter or smaller video"
        raise TriptychError("context_length_exceeded", message)
    times = rules.time_positions(len(pairs), numbers, len(places), track.fps)
    budget, most = (max(1, min(size, rules.most_tokens) // tokens) for size in (PIECE_TOKENS, 5 * PIECE_TOKENS // 4))
    starts = [min(_key_before(track.packets, places[number]) for number in pair) for pair in pairs]
    pieces, size_bytes = list[bytes](), 0
    for begin, end in _groups(starts, budget, most):
        frames = [number for pair in pairs[begin:end] for number in pair]
        last = max(places[number] for number in frames)
        piece = VideoPiece(
            codec=track.codec,
            extradata=track.extradata,
            pixel_format=track.pixel_format,
            coded_size=track.coded_size,
            rotation=track.rotation,
            size=size,
            frames=frames,
            times=times[begin:end],
            seconds=[(pair[0] + pair[-1]) / 2 / track.fps for pair in pairs[begin:end]],
            packets=[(packet.number, packet.data) for packet in track.packets[min(starts[begin:end]) : last + 1]],
            continues=begin > 0,
            prompt_text="" if begin else rules.prompt_text(numbers, len(places), track.fps),
        )
        pieces.append(_encoder.encode(piece))
        size_bytes += len(pieces[-1])
        if size_bytes > MAX_PIECES_BYTES:
            message = f"{what} has too few key frames to be decoded in parts: encode it with one every few seconds"
            raise TriptychError("item_too_large", message)
    return pieces


def _key_before(packets: Sequence[_Packet], place: int) -> int:
    """Return the place of the key frame from which the frame at `place` is decoded.

    Not of a key frame that is shown later: what is shown before it may refer to frames before it.
    """
    number = packets[place].number
    return next(at for at in range(place, -1, -1) if packets[at].is_key and (packets[at].number <= number or at == 0))


def _groups(starts: Sequence[int], budget: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield the first pair and the pair behind each piece: cut at the key frame nearest to `budget` pairs, from half of
    them to `most`; where there is none, at `budget`. The last piece has up to `most`."""
    begin = 0
    while len(starts) - begin > most:
        goal, nearby = begin + budget, range(begin + (budget + 1) // 2, begin + most + 1)
        _, end = min(((abs(at - goal), at) for at in nearby if starts[at] > starts[at - 1]), default=(0, goal))
        yield begin, end
        begin = end
    yield begin, len(starts)
