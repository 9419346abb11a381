"""Pictures of Idefics3 and SmolVLM: cut into pieces that the prompt names by row and column, and the whole."""

from __future__ import annotations

import json
from typing import Any

import numpy.typing as npt
from tokenizers import Tokenizer

from common.messages import InputLayout
from common.model_info import ModelInfo
from engine.media.image import decode_image
from engine.media.pieces import PieceSettings, picture_to_pieces
from engine.processors import preprocessor_json

_FAKE, _GLOBAL = "<fake_token_around_image>", "<global-img>"


class Idefics3Processor:
    """Pictures to pieces of one size. The placeholder becomes what the models were trained on: each piece's tokens
    behind its row and column, rows ended by a line break, the whole picture last.
    """

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
        pieces, rows, columns = picture_to_pieces(decode_image(media), self._settings)
        num_tokens = len(pieces) * self._tokens_per_piece
        if (rows, columns) not in self._expansions:
            self._expansions[rows, columns] = self._expand(rows, columns)
        layout = InputLayout(num_tokens, self._expansions[rows, columns])
        return {"pixel_values": pieces}, layout, (num_tokens, self._hidden_size)

    def _expand(self, rows: int, columns: int) -> list[tuple[int, int]]:
        """Runs of (token id, count). Tokenised as one text: a tokenizer may join the two line breaks at the end."""
        lines = [
            "".join(f"{_FAKE}<row_{row + 1}_col_{column + 1}>{self._image_token}" for column in range(columns))
            for row in range(rows)
        ]
        text = "".join(f"{line}\n" for line in lines) + ("\n" if lines else "")
        text += f"{_FAKE}{_GLOBAL}{self._image_token}{_FAKE}"
        token_ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return [(token, self._tokens_per_piece if token == self._token_id else 1) for token in token_ids]


def _tokens_per_piece(info: ModelInfo, piece_size: int) -> int:
    """Rows that the connector leaves of one piece.

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
