"""Images of Idefics3 and SmolVLM: square pieces, named in the prompt by row and column, and a small whole image.

Equal bit for bit to transformers' processors of both;
transformers' own would cost every preprocessing process seconds of imports (torch among them).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from tokenizers import Tokenizer

from common.media.video_rules import FAKE, LONGEST_EDGE, scaled_size, tokens_per_piece
from common.messages import InputLayout
from common.model_info import ModelInfo
from engine.media.image import HALVES, PixelSettings, decode_image, read_pixel_settings, to_planes
from engine.processors import Prepared


@dataclass(frozen=True)
class PieceSettings(PixelSettings):
    """Pixels: images are resized to `longest_edge` (or to `size`, height and width), pieces have `piece_size`."""

    longest_edge: int | None = 4 * 364
    size: tuple[int, int] | None = None
    piece_size: int = 364
    split: bool = True
    image_mean: tuple[float, ...] = HALVES
    image_std: tuple[float, ...] = HALVES
    resample: int = Image.Resampling.LANCZOS

    @classmethod
    def from_json(cls, json: dict[str, Any]) -> PieceSettings:
        """Read a preprocessor_config.json. Raises ValueError if the file turns off a required step."""
        size = json.get("size") or {"longest_edge": cls.longest_edge}
        longest = size.get("longest_edge")
        return cls(
            longest_edge=longest,
            size=None if longest else (int(size["height"]), int(size["width"])),
            piece_size=int((json.get("max_image_size") or {}).get("longest_edge") or cls.piece_size),
            split=bool(json.get("do_image_splitting", True)),
            **read_pixel_settings(json),
        )


def image_to_pieces(image: Image.Image, settings: PieceSettings) -> tuple[npt.NDArray[np.float32], int, int]:
    """Pieces [num_pieces, 3, piece_size, piece_size], row by row and the whole image last, with the numbers of rows
    and columns; both are 0 where the whole is the only piece.
    """
    side = settings.piece_size
    height, width = settings.size or scaled_size(image.height, image.width, settings.longest_edge or LONGEST_EDGE)
    image = image.resize((width, height), settings.resample)
    rows = columns = 0
    crops = []
    if settings.split:
        height, width = whole_pieces(height, width, side)
        image = image.resize((width, height), settings.resample)
        if max(height, width) > side:
            rows, columns = height // side, width // side
        crops = [
            image.crop((column * side, row * side, (column + 1) * side, (row + 1) * side))
            for row in range(rows)
            for column in range(columns)
        ]
    crops.append(image.resize((side, side), settings.resample))
    pieces = np.empty((len(crops), 3, side, side), dtype=np.float32)
    for index, crop in enumerate(crops):
        pieces[index] = to_planes(crop, settings.values)
    return pieces, rows, columns


def whole_pieces(height: int, width: int, side: int) -> tuple[int, int]:
    """Return (height, width) of as many whole pieces as the image needs: round up the longer edge, then the shorter
    edge after scaling along."""
    aspect = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        height = math.ceil(int(width / aspect) / side) * side
    else:
        height = math.ceil(height / side) * side
        width = math.ceil(int(height * aspect) / side) * side
    return height, width


_GLOBAL = "<global-img>"


class Idefics3Processor:
    """Images to pieces of equal size. The placeholder becomes the trained pattern: each piece's tokens behind a row and
    column, rows ended by a line break, the whole image last."""

    kind = "image"

    def __init__(self, info: ModelInfo) -> None:
        self.settings = PieceSettings.from_json(info.preprocessor)
        self.hidden_size = int(info.text_config["hidden_size"])
        self.token_id = int(info.config["image_token_id"])
        self.tokens_per_piece = tokens_per_piece(info, self.settings.piece_size)
        self.tokenizer: Tokenizer = Tokenizer.from_file(str(info.folder / "tokenizer.json"))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        image_token = self.tokenizer.id_to_token(self.token_id)
        if image_token is None:
            raise ValueError(f"the tokenizer of {info.name} has no token {self.token_id}, its image_token_id")
        self._image_token = image_token
        self._expansions: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def __call__(self, media: bytes) -> Prepared:
        pieces, rows, columns = image_to_pieces(decode_image(media), self.settings)
        num_tokens = len(pieces) * self.tokens_per_piece
        if (rows, columns) not in self._expansions:
            self._expansions[rows, columns] = self._expand(rows, columns)
        layout = InputLayout(num_tokens, self._expansions[rows, columns])
        return {"pixel_values": pieces}, layout, (num_tokens, self.hidden_size)

    def _expand(self, rows: int, columns: int) -> list[tuple[int, int]]:
        """Return runs of (token id, count), tokenised as a single text: a tokenizer may join the two line breaks at the
        end."""
        lines = [
            "".join(f"{FAKE}<row_{row + 1}_col_{column + 1}>{self._image_token}" for column in range(columns))
            for row in range(rows)
        ]
        text = "".join(f"{line}\n" for line in lines) + ("\n" if lines else "")
        text += f"{FAKE}{_GLOBAL}{self._image_token}{FAKE}"
        token_ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return [(token, self.tokens_per_piece if token == self.token_id else 1) for token in token_ids]
