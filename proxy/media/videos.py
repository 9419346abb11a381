"""Videos of requests, cut into pieces for encoders by a helper process: a crash there does not end the proxy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from common.config import Settings
from common.media.video_rules import VideoRules, read_rules
from common.media.videos import MAX_PIECES_BYTES, VideoLimits, cut
from common.model_info import ModelInfo
from common.process import malloc
from common.process.child_pool import ChildPool
from proxy.media.helper_process import naming, shared

TIMEOUT_S: Final = 60.0
"""The packets of the longest video are read in a fraction of this."""
MEMORY_BYTES: Final = 4 * MAX_PIECES_BYTES
"""Packets, pieces, and both once more on their way."""


class VideoCutter(ChildPool):
    """A helper process that reads the packets of videos; only a first frame is decoded here."""

    def __init__(
        self, info: ModelInfo, settings: Settings, max_model_len: int, on_crash: Callable[[], object] = lambda: None
    ) -> None:
        """`on_crash` is called on the loop when the helper has died or exceeded TIMEOUT_S."""
        self._rules: VideoRules = read_rules(info)
        self._limits = VideoLimits(
            max_video_seconds=settings.max_video_seconds,
            max_video_frames=settings.max_video_frames,
            max_video_pixels=settings.max_video_pixels,
            max_tokens=max_model_len,
        )
        super().__init__(
            malloc.map_large_blocks,
            work="reading",
            num_workers=1,
            timeout_s=TIMEOUT_S,
            memory_bytes=MEMORY_BYTES,
            on_crash=on_crash,
        )

    async def pieces(self, data: bytes, param: str) -> list[bytes]:
        """Run `cut`; also raises as `run` does, naming `param`."""
        with naming(param), shared(data) as path:
            return await self.run(param, cut, path, self._rules, self._limits, param)
