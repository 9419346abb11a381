"""Parameter counts of a model, from the headers of the checkpoint's files alone, or from the configuration."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Final

from engine.models.checkpoint_index import read_index

if TYPE_CHECKING:
    from common.config import LoadFormat
    from common.model_info import ModelInfo

_OF_AN_ENCODER: Final = re.compile(
    r"(^|\.)(encoder|visual|vision_tower|vision_model|audio_tower|multi_modal_projector|connector)\."
)
"""What the families' checkpoints call it. Which tensors are whose, only the workers know for certain."""


def count_parameters(info: ModelInfo, load_format: LoadFormat = "auto") -> tuple[int, int]:
    """Return the parameters of the encoder, by name, and of the rest. With the load format "dummy" no file is read,
    and none has to exist. Raises CheckpointError for missing, damaged or cut files."""
    if load_format == "dummy":
        return _configured(info)
    encoder = rest = 0
    for name, entry in read_index(info.folder).items():
        if _OF_AN_ENCODER.search(name):
            encoder += math.prod(entry.shape)
        else:
            rest += math.prod(entry.shape)
    return encoder, rest


def _configured(info: ModelInfo) -> tuple[int, int]:
    """Count the parameters of models built from the configuration, without memory; imports torch, which takes
    seconds."""
    from engine.models.registry import make_decoder, make_encoder

    encoder = make_encoder(info).module.parameters() if info.media_kind is not None else ()
    return sum(one.numel() for one in encoder), sum(one.numel() for one in make_decoder(info).parameters())
