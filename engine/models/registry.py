"""From a model folder to a loaded decoder or encoder, for every supported family."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig

from common.errors import TriptychError
from common.model_info import ModelInfo
from engine.models.base import DecoderModel, EncoderModel, LoadReport, Sources
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


def load_encoder(info: ModelInfo, device: torch.device, dtype: torch.dtype) -> tuple[EncoderModel, LoadReport]:
    """The encoder of a model, and no weight of its decoder.

    Raises TriptychError("invalid_request") for a text model, CheckpointError where the weights do not fit.
    """
    if info.media_kind is None:
        raise TriptychError("invalid_request", f"{info.name} is a text model: it has no encoder", "model")
    # Imported here: only encoders need transformers' models, which are slow to import.
    from engine.models.encoders import Qwen2_5_VLEncoder, WhisperEncoder

    config = AutoConfig.from_pretrained(info.folder)
    with torch.device("meta"):
        encoder: EncoderModel = WhisperEncoder(config) if info.family == "whisper" else Qwen2_5_VLEncoder(config)
    sources: Sources = {name: (name,) for name, _ in encoder.module.named_parameters()}
    report = load_weights(encoder.module, sources, encoder.layout, info, device, dtype)
    encoder.finish_loading(device)
    return encoder, report


def _build_decoder(info: ModelInfo, config: Any, tied: bool) -> DecoderModel:
    if info.family == "whisper":
        return WhisperDecoder(config, max_model_len=info.max_model_len, tied=tied)
    layout = QWEN2_5_VL_LAYOUT if info.family == "qwen2_5_vl" else LLAMA_LAYOUT
    text_config = config.get_text_config(decoder=True)
    return LlamaDecoder(text_config, max_model_len=info.max_model_len, tied=tied, layout=layout)
