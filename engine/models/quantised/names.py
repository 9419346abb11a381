"""The names of quantised weights in a checkpoint, told without torch."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from common.model_info import ModelInfo
from engine.models.checkpoint_index import CheckpointError

_SCALES: Final = ("scales", "weight_scale", "weight_scale_inv")
_PACKED: Final = ("qweight", "qzeros", "g_idx")
_TENSORS: Final = (*_PACKED, "weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx")
UNREAD: Final = (
    *(".input_scale", ".input_zero_point", ".activation_scale", ".output_scale", ".output_zero_point", ".kv_scale"),
    *(f".{what}_{kind}" for what in "qkv" for kind in ("scale", "zero_point")),
)
"""Endings of what quantises activations and caches, which keep the dtype of the model here."""


def parts_of(base: str, names: Collection[str]) -> dict[str, str]:
    """Return the quantised tensors of a layer, such as `layers.0.o_proj`, by their role; none if it is plain."""
    found = {role: f"{base}.{role}" for role in (*_SCALES, *_TENSORS) if f"{base}.{role}" in names}
    if found and f"{base}.weight" in names:
        found["weight"] = f"{base}.weight"
    return found


def is_quantised(name: str) -> bool:
    return name.rsplit(".", 1)[-1] in (*_SCALES, *_TENSORS)


def check_quantised(info: ModelInfo, names: Collection[str], *, as_int8: bool) -> None:
    """Raise CheckpointError where config.json and tensors disagree, or int8 is wanted of weights that are quantised."""
    there, said = any(map(is_quantised, names)), info.quantisation
    if said is not None and as_int8:
        message = f"--quantization int8 needs plain weights, and those of {info.name} are quantised ({said.method})"
    elif said is not None and not there:
        message = (
            f"config.json of {info.name} has a quantization_config ({said.method}), but the weights are plain: remove "
            "it, or get the quantised weights"
        )
    elif said is None and there:
        message = f"the weights of {info.name} are quantised, but config.json has no quantization_config that says how"
    else:
        return
    raise CheckpointError(message)
