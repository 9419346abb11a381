"""Rules of a model for videos: which frames are seen, and how large. The numbers of transformers' video processors.

The frames of a video in pairs ("temporal patches"); one token covers `side` x `side` pixels of a pair.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

import numpy as np

from common.model_info import ModelInfo, read_json

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

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest single image."""
        return self.image_pixels // self.side**2

    def tokens_of(self, size: tuple[int, int]) -> int:
        """Return the tokens of a pair of scaled frames."""
        return size[0] * size[1] // self.side**2

    def prompt_text(self, frame_numbers: Sequence[int], num_frames: int, fps: float) -> str:
        """Return what a prompt has in place of a video of a model that reads more than its frames."""
        return ""

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
        cap = self.max_pixels
        floor, area = int(self.min_pixels * _CAP_FLOOR), self.max_video_tokens * self.side**2
        if not self.per_video:
            if self.cap_pixels_per_frame:
                cap = max(min(cap, int(area * _CAP_SHARE) * self.temporal_patch_size // num_frames), floor)
            return fit(width, height, self.side, (self.min_pixels, cap))
        if self.cap_pixels_per_frame:
            cap = max(min(area, self.max_pixels // num_frames), floor) * num_frames
        if min(width, height) < self.side:
            scale = max(self.side / height, self.side / width)
            width, height = int(width * scale), int(height * scale)
        even = round(num_frames / self.temporal_patch_size) * self.temporal_patch_size
        return fit(width, height, self.side, (self.min_pixels, cap), (num_frames, even))

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


FAKE: Final = "<fake_token_around_image>"
_SKIPPED_S: Final = 1
"""At both ends of a video with more frames than are sampled."""
LONGEST_EDGE: Final = 4096
"""Nothing is resized beyond this, whatever the settings say."""
_ONES: Final = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS: Final = "twenty thirty forty fifty sixty seventy eighty ninety"


@dataclass(frozen=True)
class FrameRules(VideoRules):
    """Rules of SmolVLM: a frame is scaled as `size` says, then to one square piece, and is a pair of its own.

    `image_tokens` are those of the largest single image.
    """

    fps: float | None = 1.0
    num_frames: int | None = 64
    temporal_patch_size: int = 1
    longest_edge: int = 4 * 364
    fixed_size: tuple[int, int] | None = None
    frame_tokens: int = 81
    image_tokens: int = 17 * 81

    @property
    def most_tokens(self) -> int:
        return self.image_tokens

    def tokens_of(self, size: tuple[int, int]) -> int:
        return self.frame_tokens

    def prompt_text(self, frame_numbers: Sequence[int], num_frames: int, fps: float) -> str:
        """Return the text around a video, with `<image>` for all frames and what stands between them."""
        count, duration = words_of(len(frame_numbers)), timedelta(seconds=int(num_frames / fps))
        intro = f"You are provided the following series of {count} frames from a {duration} [H:MM:SS] video.\n"
        return f"{intro}{frame_text(frame_numbers[0] / fps)}<image>{FAKE}\n\n"

    def sample(self, num_frames: int, fps: float) -> list[int]:
        if not self.do_sample_frames:
            return list(range(num_frames))
        seconds, rate, most = num_frames / fps, self.fps or 1.0, self.num_frames or 64
        first, last = 0, num_frames - 1
        if seconds - 2 * _SKIPPED_S > most * rate:
            first, last = int(_SKIPPED_S * fps), min(int(num_frames - _SKIPPED_S * fps), last)
        if first >= last:
            first, last = 0, num_frames - 1
        wanted = max(1, min(round(rate * seconds), most))
        return [int(index) for index in np.unique(np.linspace(first, last, wanted, dtype=int))]

    def frame_size(self, width: int, height: int, num_frames: int) -> tuple[int, int]:
        height, width = self.fixed_size or scaled_size(height, width, min(self.longest_edge, LONGEST_EDGE))
        return width, height


def frame_text(second: float) -> str:
    """Return what SmolVLM reads before a frame."""
    return f"\nFrame from {int(second // 60):02d}:{int(second % 60):02d}:{FAKE}<global-img>"


def words_of(number: int) -> str:
    """Return a number below a million in English words, as num2words does."""
    if number < 20:
        return _ONES.split()[number]
    if number < 100:
        tens = _TENS.split()[number // 10 - 2]
        return f"{tens}-{words_of(number % 10)}" if number % 10 else tens
    size, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
    count, rest = divmod(number, size)
    joint = " and " if rest < 100 else ", "
    return f"{words_of(count)} {name}" + (joint + words_of(rest) if rest else "")


def scaled_size(height: int, width: int, longest_edge: int) -> tuple[int, int]:
    """Return (height, width) with the longer edge as given, the shorter edge even, and neither above 4096."""
    aspect = width / height
    if width >= height:
        width, height = longest_edge, _even(int(longest_edge / aspect))
    else:
        height, width = longest_edge, _even(int(longest_edge * aspect))
    height, width = max(height, 1), max(width, 1)
    aspect = width / height
    if width >= height and width > LONGEST_EDGE:
        width, height = LONGEST_EDGE, int(LONGEST_EDGE / aspect)
    elif height > width and height > LONGEST_EDGE:
        height, width = LONGEST_EDGE, int(LONGEST_EDGE * aspect)
    return max(height, 1), max(width, 1)


def _even(length: int) -> int:
    return length + length % 2


def tokens_per_piece(info: ModelInfo, piece_size: int) -> int:
    """Return the number of rows of Idefics3 and SmolVLM per square piece, after the connector.

    Raises ValueError where they are not what the checkpoint's own processor puts into prompts.
    """
    side = piece_size // int(info.config["vision_config"]["patch_size"])
    num_tokens = side**2 // int(info.config.get("scale_factor", 2)) ** 2
    promised = read_json(info.folder / "processor_config.json").get("image_seq_len")
    if promised not in (None, num_tokens):
        raise ValueError(
            f"the processor of {info.name} makes {promised} tokens of a piece of {piece_size} pixels, "
            f"its encoder {num_tokens}"
        )
    return num_tokens


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
    if info.family.frames_as_images:
        return _read_frame_rules(info)
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


def _read_frame_rules(info: ModelInfo) -> FrameRules:
    given = video_json(info)
    sampling, rules = given.get("video_sampling") or {}, FrameRules()
    size = given.get("size") or sampling.get("video_size") or {}
    longest = size.get("longest_edge")
    side = int((given.get("max_image_size") or {}).get("longest_edge") or 364)
    of_image = (info.preprocessor.get("size") or {}).get("longest_edge") or rules.longest_edge
    frame_tokens = tokens_per_piece(info, side)
    return replace(
        rules,
        fps=float(sampling.get("fps") or given.get("fps") or 1.0),
        num_frames=int(sampling.get("max_frames") or given.get("num_frames") or 64),
        longest_edge=int(longest or rules.longest_edge),
        fixed_size=(int(size["height"]), int(size["width"])) if size and not longest else None,
        frame_tokens=frame_tokens,
        image_tokens=(math.ceil(of_image / side) ** 2 + 1) * frame_tokens,
    )


def video_json(info: ModelInfo) -> dict[str, Any]:
    """Return the settings of the video processor, found where transformers finds them."""
    nested = read_json(info.folder / "processor_config.json").get("video_processor")
    alone, of_images = (read_json(info.folder / f"{kind}preprocessor_config.json") for kind in ("video_", ""))
    return nested or alone or of_images
