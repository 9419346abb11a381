"""Rules of a model for videos: which frames are seen, and how large. The numbers of transformers' video processors.

The frames of a video in pairs ("temporal patches"); one token covers `side` x `side` pixels of a pair.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from common.model_info import ModelInfo

MAX_ASPECT_RATIO: Final = 200
_CAP_SHARE: Final = 0.9
"""Share of `max_video_tokens` for all frames of a video (Qwen2-VL)."""
_CAP_FLOOR: Final = 1.05
"""Pixels of a frame at least, over `min_pixels`, whatever the cap."""


@dataclass(frozen=True)
class VideoRules:
    """Rules of a folder, by transformers' names; `side` in pixels.

    `per_video`: the limits of pixels are for all frames of a video together, and frames are sampled from the first to
    the last (Qwen3-VL). `cap_pixels_per_frame` shares `max_video_tokens` among the frames. `image_pixels` is the limit
    of a single image. `tokens_per_second` scales time positions (Qwen2.5-VL); None counts pairs.
    """

    fps: float | None = 2.0
    num_frames: int | None = None
    min_frames: int = 4
    max_frames: int = 768
    temporal_patch_size: int = 2
    patch_size: int = 14
    merge_size: int = 2
    min_pixels: int = 128 * 28 * 28
    max_pixels: int = 768 * 28 * 28
    image_pixels: int = 1280 * 28 * 28
    cap_pixels_per_frame: bool = True
    max_video_tokens: int = 128_000
    do_sample_frames: bool = True
    per_video: bool = False
    tokens_per_second: float | None = None

    @property
    def side(self) -> int:
        return self.patch_size * self.merge_size

    def sample(self, num_frames: int, fps: float) -> list[int]:
        """Return the numbers of the frames that the model sees, of a video's `num_frames` at `fps` per second."""
        if not self.do_sample_frames:
            return list(range(num_frames))
        if self.per_video:
            wanted = self.num_frames or int(num_frames / fps * (self.fps or fps))
            count = min(max(wanted, self.min_frames), self.max_frames, num_frames)
            return [int(index) for index in np.linspace(0, num_frames - 1, count).round()]
        step = self.temporal_patch_size
        if self.num_frames is not None:
            count = min(round(self.num_frames / step), num_frames // step) * step
        else:
            most = min(self.max_frames, num_frames) // step * step
            count = math.floor(min(max(num_frames / fps * (self.fps or fps), self.min_frames), most) / step) * step
        if count == 0:  # fewer frames than a pair has
            return list(range(num_frames))
        stride = num_frames / count
        return [min(int(index * stride), num_frames - 1) for index in range(math.ceil(num_frames / stride))]

    def frame_size(self, width: int, height: int, num_frames: int) -> tuple[int, int]:
        """Return the width and height to which `num_frames` sampled frames are scaled.

        Raises ValueError for a frame more than 200 times as long as wide.
        """
        limits, cap = (self.min_pixels, self.max_pixels), self.max_pixels
        floor, area = int(self.min_pixels * _CAP_FLOOR), self.max_video_tokens * self.side**2
        if not self.per_video:
            if self.cap_pixels_per_frame:
                cap = max(min(cap, int(area * _CAP_SHARE) * self.temporal_patch_size // num_frames), floor)
            return fit(width, height, self.side, (limits[0], cap))
        if self.cap_pixels_per_frame:
            cap = max(min(area, self.max_pixels // num_frames), floor) * num_frames
        if min(width, height) < self.side:
            scale = max(self.side / height, self.side / width)
            width, height = int(width * scale), int(height * scale)
        even = round(num_frames / self.temporal_patch_size) * self.temporal_patch_size
        return fit(width, height, self.side, (limits[0], cap), (num_frames, even))

    def time_positions(self, num_pairs: int, frame_numbers: Sequence[int], num_frames: int, fps: float) -> list[int]:
        """Return the time positions of the pairs of sampled frames, counted from the video's begin."""
        if self.tokens_per_second is None:
            return list(range(num_pairs))
        sampled_fps = len(frame_numbers) / num_frames * fps
        interval = np.float32(self.tokens_per_second) * np.float32(self.temporal_patch_size / sampled_fps)
        positions = np.arange(num_pairs).astype(np.float32) * interval
        return [int(position) for position in positions]


def fit(
    width: int, height: int, side: int, limits: tuple[int, int], num_frames: tuple[int, int] = (1, 1)
) -> tuple[int, int]:
    """Return the scaled width and height: multiples of `side`, pixels of all frames between the limits, the aspect kept
    as far as possible (`smart_resize` of Qwen2-VL and Qwen3-VL).

    `num_frames` are the frames, and the same rounded to whole pairs. Raises ValueError for a long strip.
    """
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        message = f"a picture of {width} x {height} pixels: one side is more than {MAX_ASPECT_RATIO} times the other"
        raise ValueError(message)
    least, most = limits
    count, even = num_frames
    new_height, new_width = round(height / side) * side, round(width / side) * side
    if even * new_height * new_width > most:
        shrink = math.sqrt(count * height * width / most)
        new_height = max(side, math.floor(height / shrink / side) * side)
        new_width = max(side, math.floor(width / shrink / side) * side)
    elif even * new_height * new_width < least:
        grow = math.sqrt(least / (count * height * width))
        new_height = math.ceil(height * grow / side) * side
        new_width = math.ceil(width * grow / side) * side
    return new_width, new_height


_QWEN2_VL: Final = VideoRules()
_FAMILIES: Final[Mapping[str, VideoRules]] = {
    "qwen2_vl": _QWEN2_VL,
    "qwen2_5_vl": replace(_QWEN2_VL, tokens_per_second=4.0),
    "qwen3_vl": VideoRules(
        patch_size=16,
        min_pixels=128 * 32 * 32,
        max_pixels=768 * 32 * 32,
        image_pixels=768 * 32 * 32,
        max_video_tokens=768,
        per_video=True,
    ),
}


def read_rules(info: ModelInfo) -> VideoRules:
    """Read the rules of a model folder: those of its JSON files over transformers' defaults.

    Where the files leave it open, two frames per second are sampled and pixels are capped, as in Qwen's own qwen-vl-
    utils. Raises LookupError for a family without videos.
    """
    rules, given = _FAMILIES[info.family.name], video_json(info)
    size = given.get("size") or {}
    named = {name: given[name] for name in VideoRules.__dataclass_fields__ if given.get(name) is not None}
    named.setdefault("min_pixels", size.get("shortest_edge", rules.min_pixels))
    named.setdefault("max_pixels", size.get("longest_edge", rules.max_pixels))
    if named.get("num_frames") is not None:
        named.setdefault("fps", None)
    image = {**info.preprocessor, **(info.preprocessor.get("size") or {})}
    named["image_pixels"] = image.get("max_pixels") or image.get("longest_edge") or rules.image_pixels
    if rules.tokens_per_second is not None:
        named["tokens_per_second"] = info.config["vision_config"].get("tokens_per_second", rules.tokens_per_second)
    return replace(rules, **named)


def video_json(info: ModelInfo) -> dict[str, Any]:
    """Return the settings of the video processor, found where transformers finds them."""
    nested = _json_of(info, "processor_config.json").get("video_processor")
    return nested or _json_of(info, "video_preprocessor_config.json") or info.preprocessor


def _json_of(info: ModelInfo, name: str) -> dict[str, Any]:
    path = info.folder / name
    settings: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return settings
