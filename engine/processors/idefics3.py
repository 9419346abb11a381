"""Images of Idefics3 and SmolVLM: square pieces, named in the prompt by row and column, and a small whole image.

Equal bit for bit to transformers' processors of both;
transformers' own would cost every preprocessing process seconds of imports (torch among them).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from tokenizers import Tokenizer

from common.messages import InputLayout
from common.model_info import ModelInfo
from engine.media.image import HALVES, decode_image, require_steps, to_planes, values_of_bytes
from engine.processors import preprocessor_json

_LONGEST_EDGE = 4096
"""Never resized beyond this, whatever the settings say."""


@dataclass(frozen=True)
class PieceSettings:
    """Pixels: images are resized to `longest_edge` (or to `size`, height and width), pieces have `piece_size`."""

    longest_edge: int | None = 4 * 364
    size: tuple[int, int] | None = None
    piece_size: int = 364
    split: bool = True
    image_mean: tuple[float, ...] = HALVES
    image_std: tuple[float, ...] = HALVES
    rescale_factor: float = 1 / 255
    resample: int = Image.Resampling.LANCZOS

    @classmethod
    def from_json(cls, json: dict[str, Any]) -> PieceSettings:
        """Read a preprocessor_config.json. Raises ValueError if the file turns off a required step."""
        require_steps(json, "do_resize", "do_rescale", "do_normalize")
        size = json.get("size") or {"longest_edge": cls.longest_edge}
        longest = size.get("longest_edge")
        return cls(
            longest_edge=longest,
            size=None if longest else (int(size["height"]), int(size["width"])),
            piece_size=int((json.get("max_image_size") or {}).get("longest_edge") or cls.piece_size),
            split=bool(json.get("do_image_splitting", True)),
            image_mean=tuple(json.get("image_mean") or cls.image_mean),
            image_std=tuple(json.get("image_std") or cls.image_std),
            **{name: json[name] for name in ("rescale_factor", "resample") if json.get(name) is not None},
        )


def image_to_pieces(image: Image.Image, settings: PieceSettings) -> tuple[npt.NDArray[np.float32], int, int]:
    """Pieces [num_pieces, 3, piece_size, piece_size], row by row and the whole image last, with the numbers of rows
    and columns; both are 0 where the whole is the only piece.
    """
    side = settings.piece_size
    height, width = settings.size or scaled_size(image.height, image.width, settings.longest_edge or _LONGEST_EDGE)
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
    values = values_of_bytes(settings.image_mean, settings.image_std, settings.rescale_factor)
    pieces = np.empty((len(crops), 3, side, side), dtype=np.float32)
    for index, crop in enumerate(crops):
        pieces[index] = to_planes(crop, values)
    return pieces, rows, columns


def scaled_size(height: int, width: int, longest_edge: int) -> tuple[int, int]:
    """Return (height, width) with the longer edge as given, the shorter edge even, and neither above 4096."""
    aspect = width / height
    if width >= height:
        width, height = longest_edge, _even(int(longest_edge / aspect))
    else:
        height, width = longest_edge, _even(int(longest_edge * aspect))
    height, width = max(height, 1), max(width, 1)
    aspect = width / height
    if width >= height and width > _LONGEST_EDGE:
        width, height = _LONGEST_EDGE, int(_LONGEST_EDGE / aspect)
    elif height > width and height > _LONGEST_EDGE:
        height, width = _LONGEST_EDGE, int(_LONGEST_EDGE * aspect)
    return max(height, 1), max(width, 1)


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


def _even(length: int) -> int:
    return length + length % 2


_FAKE, _GLOBAL = "<fake_token_around_image>", "<global-img>"


class Idefics3Processor:
    """Images to pieces of equal size. The placeholder becomes the trained pattern: each piece's tokens behind a row and
    column, rows ended by a line break, the whole image last."""

    kind = "image"

    def __init__(self, info: ModelInfo) -> None:
        self._settings = PieceSettings.from_json(preprocessor_json(info, "image_processor"))
        self._hidden_size = int(info.text_config["hidden_size"])
        self._token_id = int(info.config["image_token_id"])
        self._tokens_per_piece = _tokens_per_piece(info, self._settings.piece_size)
        self._tokenizer: Tokenizer = Tokenizer.from_file(str(info.folder / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        image_token = self._tokenizer.id_to_token(self._token_id)
        if image_token is None:
            raise ValueError(f"the tokenizer of {info.name} has no token {self._token_id}, its image_token_id")
        self._image_token = image_token
        self._expansions: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def __call__(self, media: bytes) -> tuple[dict[str, npt.NDArray[Any]], InputLayout, tuple[int, ...]]:
        pieces, rows, columns = image_to_pieces(decode_image(media), self._settings)
        num_tokens = len(pieces) * self._tokens_per_piece
        if (rows, columns) not in self._expansions:
            self._expansions[rows, columns] = self._expand(rows, columns)
        layout = InputLayout(num_tokens, self._expansions[rows, columns])
        return {"pixel_values": pieces}, layout, (num_tokens, self._hidden_size)

    def _expand(self, rows: int, columns: int) -> list[tuple[int, int]]:
        """Return runs of (token id, count), tokenised as a single text: a tokenizer may join the two line breaks at the
        end."""
        lines = [
            "".join(f"{_FAKE}<row_{row + 1}_col_{column + 1}>{self._image_token}" for column in range(columns))
            for row in range(rows)
        ]
        text = "".join(f"{line}\n" for line in lines) + ("\n" if lines else "")
        text += f"{_FAKE}{_GLOBAL}{self._image_token}{_FAKE}"
        token_ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return [(token, self._tokens_per_piece if token == self._token_id else 1) for token in token_ids]


def _tokens_per_piece(info: ModelInfo, piece_size: int) -> int:
    """Return the number of rows per piece after the connector.

    Raises ValueError where they are not what the checkpoint's own processor puts into prompts.
    """
    side = piece_size // int(info.config["vision_config"]["patch_size"])
    num_tokens = side**2 // int(info.config.get("scale_factor", 2)) ** 2
    path = info.folder / "processor_config.json"
    promised = json.loads(path.read_text()).get("image_seq_len") if path.is_file() else None
    if promised not in (None, num_tokens):
        raise ValueError(
            f"the processor of {info.name} makes {promised} tokens of a piece of {piece_size} pixels, "
            f"its encoder {num_tokens}"
        )
    return num_tokens
