"""Videos: a piece of one to its sampled frames, upright and scaled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import av
import av.error
from PIL import Image

from common.errors import TriptychError
from common.media.videos import VideoPiece
from engine.media.image import MAX_PIXELS

_TURNS: Final = {90: Image.Transpose.ROTATE_90, 180: Image.Transpose.ROTATE_180, 270: Image.Transpose.ROTATE_270}


def decode_frames(piece: VideoPiece, resample: int) -> Iterator[Image.Image]:
    """Yield the sampled frames of a piece, turned and scaled. One frame at a time is held.

    Raises TriptychError("bad_media") for packets that cannot be decoded, and where a sampled frame does not come.
    """
    wanted = iter(piece.frames)
    number = next(wanted, None)
    try:
        for frame in _decoded(piece):
            if number is None or frame.pts != number:
                continue
            if frame.width * frame.height > MAX_PIXELS:
                message = f"a frame has {frame.width} x {frame.height} pixels; at most {MAX_PIXELS} are accepted"
                raise TriptychError("bad_media", message)
            image = _upright(Image.fromarray(frame.to_ndarray(format="rgb24")), piece.rotation).resize(
                piece.size, resample
            )
            while number == frame.pts:
                yield image
                number = next(wanted, None)
            if number is None:
                return
    except (av.error.FFmpegError, EOFError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TriptychError("bad_media", f"the video ({piece.codec}) cannot be decoded: {reason}") from error
    if number is not None:
        raise TriptychError("bad_media", f"frame {number} of the video ({piece.codec}) cannot be decoded")


def _decoded(piece: VideoPiece) -> Iterator[av.VideoFrame]:
    """Yield decoded frames in the order of display, their numbers as `pts`."""
    context = av.CodecContext.create(piece.codec, "r")
    assert isinstance(context, av.VideoCodecContext)
    context.thread_type, context.thread_count = "NONE", 1
    context.extradata = piece.extradata or None
    context.width, context.height = piece.coded_size
    context.pix_fmt = piece.pixel_format
    for number, data in piece.packets:
        packet = av.Packet(len(data))  # of bytes: the decoders read some padding behind a packet
        packet.update(data)
        packet.pts = number
        packet.is_keyframe = piece.codec == "png"  # whose decoder adds others to the frame before
        yield from context.decode(packet)
    yield from context.decode(None)


def _upright(image: Image.Image, rotation: int) -> Image.Image:
    turn = _TURNS.get(rotation % 360)
    return image if turn is None else image.transpose(turn)
