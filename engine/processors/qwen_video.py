"""Pieces of videos for the Qwen-VL models: pairs of frames, cut into patches as images are."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from common.errors import TriptychError
from common.media.video_rules import read_rules, video_json
from common.media.videos import VideoPiece, read_piece
from common.messages import InputLayout
from common.model_info import ModelInfo
from engine.media.video import decode_frames
from engine.processors import Arrays, Prepared
from engine.processors.qwen_vl import PatchSettings, QwenVLProcessor, frame_to_squares


class QwenVideoProcessor:
    """Pieces made by `common.media.videos.cut` to patches.

    Qwen3-VL writes the time before each pair of frames, within tokens for begin and end; the others have positions in
    time instead.
    """

    kind = "video"

    def __init__(self, info: ModelInfo) -> None:
        images = QwenVLProcessor(info)  # with its checks
        rules = read_rules(info)
        self._settings = PatchSettings.from_json({**video_json(info), "size": {}})
        self._rules, self._width = rules, images.width
        ids = info.config
        self._pad, self._begin, self._end = (
            int(ids[name]) for name in ("video_token_id", "vision_start_token_id", "vision_end_token_id")
        )
        self._tokenizer_file = str(info.folder / "tokenizer.json")

    def __call__(self, media: bytes) -> Prepared:
        piece = read_piece(media)
        (width, height), step = piece.size, self._rules.temporal_patch_size
        if width % self._rules.side or height % self._rules.side or len(piece.frames) != step * len(piece.times):
            message = f"a piece with {len(piece.frames)} frames of {width} x {height} pixels does not fit the model"
            raise TriptychError("bad_media", message)
        patches = self._patches(piece)
        num_pairs = len(piece.times)
        grid = num_pairs, height // self._rules.patch_size, width // self._rules.patch_size
        merged = height // self._rules.side, width // self._rules.side
        num_tokens = num_pairs * merged[0] * merged[1]
        arrays: Arrays = {"pixel_values": patches, "values": self._settings.values}
        arrays["image_grid_thw"] = np.array(grid)
        if self._rules.per_video:
            runs = self._with_times(piece, num_tokens // num_pairs)
            layout = InputLayout(num_tokens, runs, (1, *merged))
        else:
            runs = [(self._pad, num_tokens)]
            layout = InputLayout(num_tokens, runs, (num_pairs, *merged), times=piece.times, continues=piece.continues)
        return arrays, layout, (num_tokens, self._width)

    def _patches(self, piece: VideoPiece) -> npt.NDArray[np.uint8]:
        """Return [num_patches, channels, frames * patch_size^2], pair by pair, filled while frames are decoded.

        Bytes, not values, which the encoder looks up: four times as many pieces wait in the same memory.
        """
        (width, height), patch, step = piece.size, self._rules.patch_size, self._rules.temporal_patch_size
        shape = len(piece.times), height * width // patch**2, 3, step, patch**2
        patches = np.empty(shape, dtype=np.uint8)
        for index, image in enumerate(decode_frames(piece, self._settings.resample)):
            patches[index // step, :, :, index % step] = frame_to_squares(np.asarray(image), self._settings)
        return patches.reshape(shape[0] * shape[1], 3, -1)

    def _with_times(self, piece: VideoPiece, num_tokens: int) -> list[tuple[int, int]]:
        """Return the runs of all pairs. A run of text is one token, even before an equal one: it has no grid."""
        runs: list[tuple[int, int]] = []
        for seconds in piece.seconds:
            text = self._tokenizer.encode(f"<{seconds:.1f} seconds>", add_special_tokens=False).ids
            runs += [(token, 1) for token in (*text, self._begin)]
            runs += [(self._pad, num_tokens), (self._end, 1)]
        return runs

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(self._tokenizer_file)
