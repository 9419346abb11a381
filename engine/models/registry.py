"""From a model folder to a loaded decoder or encoder, for every supported family."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

import torch

from common.config import LoadFormat
from common.errors import TriptychError
from common.model_info import ModelInfo
from engine.models.base import DecoderModel, EncoderModel, LoadReport, Sources
from engine.models.dummy import draw_weights
from engine.models.loader import load_weights
from engine.models.skeleton import without_memory


def make_decoder(info: ModelInfo) -> DecoderModel:
    """Make the decoder of a model without memory for its weights. Raises ValueError naming an unsupported feature."""
    with without_memory():
        model: DecoderModel = pkgutil.resolve_name(info.family.decoder)(info)
    return model


def load_decoder(
    info: ModelInfo, device: torch.device, dtype: torch.dtype, load_format: LoadFormat = "auto"
) -> tuple[DecoderModel, LoadReport]:
    """Load the decoder of a model, without encoder weights; random weights with the load format "dummy".

    Raises CheckpointError where the weights do not fit the configuration, ValueError for a configuration with
    something that is not supported (both name it).
    """
    model = make_decoder(info)
    if load_format == "dummy":
        return model, draw_weights(model, device, dtype)
    tied = () if "lm_head.weight" in dict(model.named_parameters()) else ("lm_head.weight",)
    report = load_weights(model, model.sources(), model.layout, info, device, dtype, unused=tied)
    return model, report


def make_encoder(info: ModelInfo) -> EncoderModel:
    """Make the encoder of a model for media or texts, without memory for its weights."""
    # Resolved here: only encoders need transformers, which is slow to import.
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(info.folder)
    build: Callable[[Any], EncoderModel] = pkgutil.resolve_name(info.family.encoder)
    with without_memory():
        return build(config)


def load_encoder(
    info: ModelInfo, device: torch.device, dtype: torch.dtype, load_format: LoadFormat = "auto"
) -> tuple[EncoderModel, LoadReport]:
    """Load the encoder of a model, without decoder weights; random weights with the load format "dummy".

    Raises TriptychError("invalid_request") for a text model, CheckpointError where the weights do not fit.
    """
    if info.media_kind is None:
        raise TriptychError("invalid_request", f"{info.name} is a text model: it has no encoder", "model")
    encoder = make_encoder(info)
    if load_format == "dummy":
        report = draw_weights(encoder.module, device, dtype)
    else:
        sources: Sources = {name: (name,) for name, _ in encoder.module.named_parameters()}
        report = load_weights(encoder.module, sources, encoder.layout, info, device, dtype)
    encoder.finish_loading(device)
    return encoder, report
