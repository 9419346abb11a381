"""From a model folder to a loaded decoder or encoder, for every supported family."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from common.config import LoadFormat
from common.errors import TriptychError
from common.model_info import ModelInfo
from engine.models.base import DecoderModel, EncoderModel, fused_sources
from engine.models.layers import Linear
from engine.models.loading.dummy import draw_weights
from engine.models.loading.loader import has_own_head, load_weights
from engine.models.loading.skeleton import without_memory
from engine.models.quantised.weight import SmallWeight, quantise_int8


def make_decoder(info: ModelInfo) -> DecoderModel:
    """Make the decoder of a model without memory for its weights. Raises TriptychError as `load_decoder` does."""
    with _without_faults(info), without_memory():
        model: DecoderModel = pkgutil.resolve_name(info.family.decoder)(info)
    return model


def load_decoder(
    info: ModelInfo,
    device: torch.device,
    dtype: torch.dtype,
    load_format: LoadFormat = "auto",
    *,
    as_int8: bool = False,
) -> tuple[DecoderModel, int]:
    """Load the decoder of a model, without encoder weights; return it and its bytes. "dummy" makes random weights.

    An output head in the checkpoint that is not the embedding is loaded, whatever config.json says. With `as_int8`, the
    weights of linear layers become 8-bit integers. A head that is the embedding gets a copy: the embedding stays exact.
    Raises TriptychError("model_not_found") for a wrong or unsupported configuration, CheckpointError where the weights
    do not fit. Both name the fault.
    """
    model = make_decoder(info)
    if load_format == "dummy":
        num_bytes = draw_weights(model, device, dtype)
    else:
        if model.lm_head is None and has_own_head(info, model.layout):
            model.lm_head = Linear(model.spec.hidden_size, model.spec.vocab_size, bias=False, device="meta")
        tied = model.lm_head is None
        num_bytes = load_weights(model, model.sources(), model.layout, info, device, dtype, tied=tied, as_int8=as_int8)
    return model, _quantise(model) if as_int8 else num_bytes


def _quantise(model: DecoderModel) -> int:
    """Make 8-bit integers of the weights of linear layers that are none yet; return the bytes of all weights."""
    if model.lm_head is None:
        model.lm_head = Linear(1, 1, bias=False, device="meta")
        model.lm_head.replace_weight(quantise_int8(model.embed_tokens.weight))
    weights = []
    for layer in model.modules():
        if isinstance(layer, Linear):
            if not isinstance(layer.weight, SmallWeight):
                layer.replace_weight(quantise_int8(layer.weight))
            weights.append(layer.weight)
    return sum(one.nbytes for one in (*weights, *model.parameters()))


def make_encoder(info: ModelInfo) -> EncoderModel:
    """Make the encoder of a model for media or texts, without memory for its weights.

    Raises TriptychError as `load_encoder` does.
    """
    # Resolved here: only encoders need transformers, which is slow to import.
    from transformers import AutoConfig

    build: Callable[[Any], EncoderModel] = pkgutil.resolve_name(info.family.encoder)
    with _without_faults(info):
        config = AutoConfig.from_pretrained(info.folder, trust_remote_code=False)
        with without_memory():
            return build(config)


@contextmanager
def _without_faults(info: ModelInfo) -> Iterator[None]:
    """Turn an error of the block into TriptychError("model_not_found"), a sentence about config.json."""
    try:
        yield
    except TriptychError:
        raise
    except Exception as error:  # transformers and torch raise many kinds
        message = f"cannot make a {info.architecture} of {info.folder / 'config.json'}: {' '.join(str(error).split())}"
        raise TriptychError("model_not_found", message, "model") from error


def load_encoder(
    info: ModelInfo, device: torch.device, dtype: torch.dtype, load_format: LoadFormat = "auto"
) -> tuple[EncoderModel, int]:
    """Load the encoder of a model, without decoder weights; return it and its bytes. "dummy" makes random weights.

    Raises TriptychError: "invalid_request" for a text model, "model_not_found" naming a fault of the configuration.
    Raises CheckpointError where the weights do not fit.
    """
    if info.media_kind is None:
        raise TriptychError("invalid_request", f"{info.name} is a text model: it has no encoder", "model")
    encoder = make_encoder(info)
    if load_format == "dummy":
        num_bytes = draw_weights(encoder.module, device, dtype)
    else:
        sources = fused_sources(encoder.module, {"gate_up_proj": ("gate_proj", "up_proj")})
        num_bytes = load_weights(encoder.module, sources, encoder.layout, info, device, dtype)
    encoder.finish_loading(device)
    return encoder, num_bytes
