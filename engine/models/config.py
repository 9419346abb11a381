"""What a text decoder is built from, read from config.json: names of today and of older checkpoints.

Read here and not by transformers' configuration classes, which import half of torch: a decoder worker starts in half
the time without them. Their defaults are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from common.model_info import ModelInfo

_MROPE_SECTION = (16, 24, 24)
"""Qwen2.5-VL's, where its config.json does not say."""
_QWEN3_HEAD_DIM = 128
"""Qwen3's, where its config.json does not say: its heads need not add up to the hidden size."""


@dataclass(frozen=True)
class TextConfig:
    """Sizes and switches of a Llama-like decoder.

    `rope` holds `rope_type`, `rope_theta` and what that type needs. `qk_norm` is a norm of each head of the queries and
    of the keys, before they are rotated.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: dict[str, Any]
    mrope_section: tuple[int, int, int] | None
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool


def read_text_config(info: ModelInfo) -> TextConfig:
    """Raises ValueError for what is not computed here: sliding windows, other activations, partial rotation."""
    json = info.text_config
    activation = json.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"activation {activation!r} is not supported; supported: silu")
    _check_windows(json, info.max_model_len)
    num_heads = int(json["num_attention_heads"])
    rope = _rope(json)
    kind = str(json.get("model_type") or info.family.name)
    qwen2, qwen3 = kind.startswith("qwen2"), kind.startswith("qwen3")
    biased = bool(json.get("attention_bias", False)) and not qwen2
    head_dim = json.get("head_dim") or (_QWEN3_HEAD_DIM if qwen3 else int(json["hidden_size"]) // num_heads)
    return TextConfig(
        vocab_size=int(json["vocab_size"]),
        hidden_size=int(json["hidden_size"]),
        intermediate_size=int(json["intermediate_size"]),
        num_layers=int(json["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=int(json.get("num_key_value_heads") or num_heads),
        head_dim=int(head_dim),
        rms_norm_eps=float(json.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=int(json["max_position_embeddings"]),
        rope=rope,
        mrope_section=_three(rope.get("mrope_section", _MROPE_SECTION)) if info.family.name == "qwen2_5_vl" else None,
        qkv_bias=biased or qwen2,
        o_bias=biased,
        mlp_bias=bool(json.get("mlp_bias", False)),
        qk_norm=qwen3,
        tied=is_tied(info, default=False),
    )


def is_tied(info: ModelInfo, *, default: bool) -> bool:
    """Whether the output head is the embedding; the outermost configuration decides."""
    return bool(info.config.get("tie_word_embeddings", default))


def _rope(json: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters`, or what stood in `rope_theta` and `rope_scaling` before there was that."""
    given: dict[str, Any] = json.get("rope_parameters") or json.get("rope_scaling") or {}
    rope_type = given.get("rope_type") or given.get("type") or "default"
    partial = given.get("partial_rotary_factor") or json.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ValueError(f"rotary positions over {partial:g} of the dimensions are not supported")
    return {
        "original_max_position_embeddings": json["max_position_embeddings"],
        **given,
        "rope_theta": float(given.get("rope_theta") or json.get("rope_theta") or 10_000.0),
        "rope_type": "default" if rope_type == "mrope" else rope_type,
    }


def _check_windows(json: dict[str, Any], max_model_len: int) -> None:
    window = json.get("sliding_window") if json.get("use_sliding_window") else None
    if window is None or window >= max_model_len:
        return
    first = int(json.get("max_window_layers", 0))
    layer_types = json.get("layer_types") or ["sliding_attention"] * (int(json["num_hidden_layers"]) - first)
    if "sliding_attention" in layer_types:
        raise ValueError(f"sliding-window attention over {window} of {max_model_len} tokens is not supported")


def _three(section: Any) -> tuple[int, int, int]:
    time, height, width = section
    return int(time), int(height), int(width)
