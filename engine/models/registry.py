"""From a model folder to a loaded decoder or encoder, for every supported family."""

from __future__ import annotations

import torch

from common.errors import TriptychError
from common.model_info import ModelInfo
from engine.models.base import DecoderModel, EncoderModel, LoadReport, Sources
from engine.models.config import is_tied, read_text_config
from engine.models.llama import LLAMA_LAYOUT, QWEN2_5_VL_LAYOUT, LlamaDecoder
from engine.models.loader import load_weights
from engine.models.whisper import WhisperDecoder


def load_decoder(info: ModelInfo, device: torch.device, dtype: torch.dtype) -> tuple[DecoderModel, LoadReport]:
    """The decoder of a model, and no weight of its encoder.

    Raises CheckpointError where the weights do not fit the configuration, ValueError for a configuration with
    something that is not supported (both name it).
    """
    with torch.device("meta"):
        model = _build_decoder(info)
    tied_heads = tuple({"lm_head.weight", "proj_out.weight"} - dict(model.named_parameters()).keys())
    report = load_weights(model, model.sources(), model.layout, info, device, dtype, unused=tied_heads)
    return model, report


def load_encoder(info: ModelInfo, device: torch.device, dtype: torch.dtype) -> tuple[EncoderModel, LoadReport]:
    """The encoder of a model, and no weight of its decoder.

    Raises TriptychError("invalid_request") for a text model, CheckpointError where the weights do not fit.
    """
    if info.media_kind is None:
        raise TriptychError("invalid_request", f"{info.name} is a text model: it has no encoder", "model")
    # Imported here: only encoders need transformers, which is slow to import.
    from transformers import AutoConfig

    from engine.models.encoders import Qwen2_5_VLEncoder, WhisperEncoder

    config = AutoConfig.from_pretrained(info.folder)
    with torch.device("meta"):
        encoder: EncoderModel = WhisperEncoder(config) if info.family == "whisper" else Qwen2_5_VLEncoder(config)
    sources: Sources = {name: (name,) for name, _ in encoder.module.named_parameters()}
    report = load_weights(encoder.module, sources, encoder.layout, info, device, dtype)
    encoder.finish_loading(device)
    return encoder, report


def _build_decoder(info: ModelInfo) -> DecoderModel:
    if info.family == "whisper":
        tied = is_tied(info, default=True)
        return WhisperDecoder(info.config, max_model_len=info.max_model_len, tied=tied)
    layout = QWEN2_5_VL_LAYOUT if info.family == "qwen2_5_vl" else LLAMA_LAYOUT
    return LlamaDecoder(read_text_config(info), max_model_len=info.max_model_len, layout=layout)
