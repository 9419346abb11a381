"""Pictures to square pieces and a small whole, bit for bit as transformers' Idefics3 and SmolVLM processors make them.

Written here because transformers' own cost seconds of imports (torch among them) in every preprocessing process.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from engine.media.normalize import HALVES, to_planes, values_of_bytes

_LONGEST_EDGE = 4096
"""Never resized beyond this, whatever the settings say."""


@dataclass(frozen=True)
class PieceSettings:
    """Pixels: pictures are resized to `longest_edge` (or to `size`, height and width), pieces have `piece_size`."""

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
        """From a preprocessor_config.json. Raises ValueError where it turns off a step that is always done here."""
        skipped = [step for step in ("do_resize", "do_rescale", "do_normalize") if json.get(step, True) is False]
        if skipped:
            raise ValueError(f"a preprocessor with {skipped[0]} = false is not supported")
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


def picture_to_pieces(image: Image.Image, settings: PieceSettings) -> tuple[npt.NDArray[np.float32], int, int]:
    """Pieces [num_pieces, 3, piece_size, piece_size], row by row and the whole picture last, with the numbers of rows
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
    """(height, width) with the longer edge as given, the shorter one even, and neither above 4096."""
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
    """(height, width) of as many whole pieces as the picture needs: the longer edge is rounded up, and the shorter
    one after it has grown along."""
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
