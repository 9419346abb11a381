"""Parameter counts of a model, from the headers of the checkpoint's files alone, or from the configuration."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from common.config import LoadFormat
    from common.model_info import ModelInfo

_MAX_HEADER_BYTES: Final = 100 * 2**20
_OF_AN_ENCODER: Final = re.compile(
    r"(^|\.)(encoder|visual|vision_tower|vision_model|audio_tower|multi_modal_projector|connector)\."
)
"""What the families' checkpoints call it. Which tensors are whose, only the workers know for certain."""


def count_parameters(info: ModelInfo, load_format: LoadFormat = "auto") -> tuple[int, int]:
    """Return the parameters of the encoder, by name, and of the rest. Damaged files count as empty: the workers report
    damage. With the load format "dummy" no file is read, and none has to exist."""
    if load_format == "dummy":
        return _configured(info)
    encoder = rest = 0
    for path in info.folder.glob("*.safetensors"):
        for name, size in _sizes(path).items():
            if _OF_AN_ENCODER.search(name):
                encoder += size
            else:
                rest += size
    return encoder, rest


def _configured(info: ModelInfo) -> tuple[int, int]:
    """Count the parameters of models built from the configuration, without memory; imports torch, which takes
    seconds."""
    from engine.models.registry import make_decoder, make_encoder

    encoder = make_encoder(info).module.parameters() if info.media_kind is not None else ()
    return sum(one.numel() for one in encoder), sum(one.numel() for one in make_decoder(info).parameters())


def _sizes(path: Path) -> dict[str, int]:
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, _MAX_HEADER_BYTES)))
        return {name: math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
