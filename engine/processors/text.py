"""Encoder prompts: token ids, checked."""

from __future__ import annotations

import numpy as np

from common.messages import InputLayout
from common.model_info import ModelInfo
from common.text.prompts import check_encoder_prompt, decode_tokens
from engine.processors import Prepared


class TextTokensProcessor:
    """The token ids of an encoder prompt as little-endian uint32. Raises TriptychError for ids refused by the
    encoder."""

    kind = "text"

    def __init__(self, info: ModelInfo) -> None:
        self._info = info
        self._hidden_size = int(info.config["d_model"])

    def __call__(self, media: bytes) -> Prepared:
        token_ids = decode_tokens(media)
        check_encoder_prompt(self._info, token_ids)
        arrays = {"input_ids": np.asarray(token_ids, np.int64)}
        return arrays, InputLayout(len(token_ids), [], None), (len(token_ids), self._hidden_size)
