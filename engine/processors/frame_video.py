"""Pieces of videos for SmolVLM: sampled frames, each scaled to a square piece as a small image is."""

from __future__ import annotations

import numpy as np

from common.errors import TriptychError
from common.media.video_rules import FAKE, LONGEST_EDGE, frame_text, video_json
from common.media.videos import read_piece
from common.messages import InputLayout
from common.model_info import ModelInfo
from engine.media.image import to_planes
from engine.media.video import decode_frames
from engine.processors import Prepared
from engine.processors.idefics3 import Idefics3Processor, PieceSettings


class FrameVideoProcessor:
    """Pieces made by `common.media.videos.cut`. The prompt has the text before the first frame of a video and behind
    the last; a piece has the text between frames."""

    kind = "video"

    def __init__(self, info: ModelInfo) -> None:
        self._images = Idefics3Processor(info)  # with its checks
        self._settings = PieceSettings.from_json({**video_json(info), "size": {}})

    def __call__(self, media: bytes) -> Prepared:
        piece, images, side = read_piece(media), self._images, self._settings.piece_size
        if len(piece.frames) != len(piece.seconds) or not 1 <= min(piece.size) <= max(piece.size) <= LONGEST_EDGE:
            message = f"a piece with {len(piece.frames)} frames of {piece.size} pixels does not fit the model"
            raise TriptychError("bad_media", message)
        pixels = np.empty((len(piece.frames), 3, side, side), dtype=np.float32)
        for index, image in enumerate(decode_frames(piece, self._settings.resample)):
            pixels[index] = to_planes(image.resize((side, side), self._settings.resample), self._settings.values)
        runs: list[tuple[int, int]] = []
        for index, second in enumerate(piece.seconds):
            if index or piece.continues:
                between = images.tokenizer.encode(FAKE + frame_text(second), add_special_tokens=False)
                runs += [(token, 1) for token in between.ids]
            runs.append((images.token_id, images.tokens_per_piece))
        num_tokens = len(pixels) * images.tokens_per_piece
        return {"pixel_values": pixels}, InputLayout(num_tokens, runs), (num_tokens, images.hidden_size)
