"""Small videos, written by PyAV in the test that needs them."""

from __future__ import annotations

import io
from typing import Any

import av
import numpy as np
import numpy.typing as npt

Frames = npt.NDArray[np.uint8]


def moving(num_frames: int, width: int = 160, height: int = 120, seed: int = 0) -> Frames:
    """[num_frames, height, width, 3]: gradients that move and change, no two frames alike."""
    y, x = np.mgrid[:height, :width]
    speeds = np.random.default_rng(seed).integers(3, 12, 3)
    frames = [
        np.stack([x * 2 + n * speeds[0], y * 2 + n * speeds[1], x + y + n * speeds[2]], axis=-1)
        for n in range(num_frames)
    ]
    return (np.stack(frames) % 256).astype(np.uint8)


def video_file(
    frames: Frames,
    fps: int = 10,
    *,
    codec: str = "mpeg4",
    muxer: str = "mp4",
    rotation: float = 0,
    times: list[int] | None = None,
    pix_fmt: str = "yuv420p",
    **options: Any,
) -> bytes:
    """A video of `frames`, as FFmpeg's `codec` and `muxer` write it; `options` are the codec's.

    `times`: when each frame is shown, in frames at `fps`, for a rate that varies. `rotation`: to be turned when shown,
    in degrees counter-clockwise.
    """
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=muxer) as file:
        stream = file.add_stream(codec, rate=fps, options={name: str(value) for name, value in options.items()})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = pix_fmt
        if rotation:
            stream.set_display_rotation(rotation)
        for number, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, "rgb24")
            if times is not None:
                frame.pts, frame.time_base = times[number], 1 / stream.codec_context.framerate
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    return buffer.getvalue()


def all_frames(media: bytes) -> Frames:
    """Every frame of a file, decoded the plain way: [num_frames, height, width, 3]."""
    with av.open(io.BytesIO(media)) as file:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)])
