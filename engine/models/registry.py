"""From a model folder to a loaded decoder or encoder, for every supported family."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig

from common.model_info import ModelInfo
from engine.models.base import DecoderModel, LoadReport
from engine.models.llama import LLAMA_LAYOUT, QWEN2_5_VL_LAYOUT, LlamaDecoder
from engine.models.loader import load_weights
from engine.models.whisper import WhisperDecoder


def load_decoder(info: ModelInfo, device: torch.device, dtype: torch.dtype) -> tuple[DecoderModel, LoadReport]:
    """The decoder of a model, and no weight of its encoder.

    Raises CheckpointError where the weights do not fit the configuration, ValueError for a configuration with
    something that is not supported (both name it).
    """
    config = AutoConfig.from_pretrained(info.folder)
    tied = bool(config.tie_word_embeddings)
    with torch.device("meta"):
        model = _build_decoder(info, config, tied)
    unused = ("lm_head.weight", "proj_out.weight") if tied else ()
    report = load_weights(model, model.sources(), model.layout, info, device, dtype, unused=unused)
    return model, report


def _build_decoder(info: ModelInfo, config: Any, tied: bool) -> DecoderModel:
    if info.family == "whisper":
        return WhisperDecoder(config, max_model_len=info.max_model_len, tied=tied)
    layout = QWEN2_5_VL_LAYOUT if info.family == "qwen2_5_vl" else LLAMA_LAYOUT
    text_config = config.get_text_config(decoder=True)
    return LlamaDecoder(text_config, max_model_len=info.max_model_len, tied=tied, layout=layout)
