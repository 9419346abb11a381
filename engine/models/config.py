"""Configuration of a text decoder from config.json, by present names and by names in older checkpoints.

Read here and not by transformers' configuration classes, which import half of torch: a decoder worker starts in half
the time without them. Their defaults are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from common.model_info import ModelInfo

_MROPE_SECTIONS = {"qwen2_vl": (16, 24, 24), "qwen2_5_vl": (16, 24, 24), "qwen3_vl": (24, 20, 20)}
"""Families whose positions have three axes: how many frequencies each turns where config.json does not say."""
_ORIGINAL_LENGTH = "original_max_position_embeddings"
_SLIDING_WINDOW, _MAX_WINDOW_LAYERS, _WINDOW_PATTERN = 4096, 28, 6
"""transformers' defaults where a config.json does not say; null means no window."""


@dataclass(frozen=True)
class TextConfig:
    """Sizes and switches of a Llama-like decoder.

    `rope` holds `rope_type`, `rope_theta` and what that type needs. `qk_norm` is a norm of each head of the queries and
    of the keys, before they are rotated. `mrope_interleaved`: time, height and width take turns along the frequencies
    instead of taking a section each. `windows`: how many tokens each layer sees, its own included; None for all.
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
    mrope_interleaved: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    tied: bool


def read_text_config(info: ModelInfo) -> TextConfig:
    """Read the configuration. Raises ValueError for unsupported features: other activations, partial rotation."""
    json = info.text_config
    activation = json.get("hidden_act", "silu")
    kind = str(json.get("model_type") or info.family.name)
    if activation not in ("silu", "swish") and not kind.startswith("gemma3"):  # Gemma's is `hidden_activation`
        raise ValueError(f"activation {activation!r} is not supported; supported: silu")
    num_heads = int(json["num_attention_heads"])
    head_dim = int(json.get("head_dim") or json["hidden_size"] // num_heads)
    rope = _rope(json, info.config.get("text_config") or info.config)
    mrope_section = _MROPE_SECTIONS.get(info.family.name)
    axes: Any = rope.get("mrope_section", mrope_section)  # time, height, width; Qwen3-VL takes of them what fits
    if mrope_section and info.family.name != "qwen3_vl" and (len(axes), sum(axes)) != (3, head_dim // 2):
        raise ValueError(f"mrope_section {axes} is not three numbers with the sum {head_dim // 2}, half of head_dim")
    qwen2, qwen3 = kind.startswith("qwen2"), kind.startswith("qwen3")
    biased = bool(json.get("attention_bias", False)) and not qwen2
    return TextConfig(
        vocab_size=int(json["vocab_size"]),
        hidden_size=int(json["hidden_size"]),
        intermediate_size=int(json["intermediate_size"]),
        num_layers=int(json["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=int(json.get("num_key_value_heads") or num_heads),
        head_dim=head_dim,
        rms_norm_eps=float(json.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=int(json["max_position_embeddings"]),
        rope=rope,
        mrope_section=mrope_section and (int(axes[0]), int(axes[1]), int(axes[2])),
        mrope_interleaved=info.family.name == "qwen3_vl",
        qkv_bias=biased or qwen2,
        o_bias=biased,
        mlp_bias=bool(json.get("mlp_bias", False)),
        qk_norm=qwen3,
        windows=_windows(json, kind, info.max_model_len),
        tied=is_tied(info, default=info.family.name.startswith(("gemma3", "qwen3_asr"))),
    )


def is_tied(info: ModelInfo, *, default: bool) -> bool:
    """Whether the output head is the embedding; the outermost configuration decides.

    But not of Qwen2-VL, Qwen2.5-VL and LLaVA: older versions of transformers saved it in the text part alone.
    """
    if info.family.name in ("qwen2_vl", "qwen2_5_vl", "llava"):
        nested = info.config.get("text_config") or {}
        return bool(info.config.get("tie_word_embeddings") or nested.get("tie_word_embeddings"))
    return bool(info.config.get("tie_word_embeddings", default))


def _rope(json: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters`, or the older `rope_theta` and `rope_scaling`, which goes first where both are given.

    `own` is the part of config.json that `json` adds defaults and outer values to.
    """
    given: dict[str, Any] = own.get("rope_parameters") or {}
    whole = given.get("full_attention") or {}  # of Gemma 3, whose layers with a window have others
    given = {**whole, **(own.get("rope_scaling") or {})} or given
    rope_type = given.get("rope_type") or given.get("type") or "default"
    partial = given.get("partial_rotary_factor") or json.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ValueError(f"rotary positions over {partial:g} of the dimensions are not supported")
    original = own.get(_ORIGINAL_LENGTH) or given.get(_ORIGINAL_LENGTH) or json["max_position_embeddings"]
    return {
        **given,
        _ORIGINAL_LENGTH: original,
        "rope_theta": float(given.get("rope_theta") or json.get("rope_theta") or 10_000.0),
        "rope_type": "default" if rope_type == "mrope" else rope_type,
    }


def _windows(json: dict[str, Any], kind: str, max_model_len: int) -> tuple[int | None, ...]:
    """Return the number of visible tokens for each layer, the own token included; None for all."""
    window = json.get("sliding_window", _SLIDING_WINDOW)
    if window is None or window >= max_model_len:
        return (None,) * int(json["num_hidden_layers"])
    return tuple(int(window) if slides else None for slides in sliding_layers(json, kind))


def sliding_layers(json: dict[str, Any], kind: str) -> list[bool]:
    """Return which layers have a window, by the `kind` of the model."""
    num_layers, given = int(json["num_hidden_layers"]), json.get("layer_types")
    if kind.startswith("mistral"):  # those of Ministral, which calls itself Mistral, have `layer_types`
        default = [True] * num_layers
    elif kind.startswith("gemma3"):
        pattern = int(json.get("sliding_window_pattern") or _WINDOW_PATTERN)
        default = [bool((index + 1) % pattern) for index in range(num_layers)]
    elif kind.startswith("qwen") and json.get("use_sliding_window"):
        first = int(json.get("max_window_layers", _MAX_WINDOW_LAYERS))
        default = [index >= first for index in range(num_layers)]
    else:
        if json.get("sliding_window") and not kind.startswith("qwen") and {*(given or ())} != {"full_attention"}:
            raise ValueError(f"sliding_window of model_type {kind!r} is not supported")
        return [False] * num_layers
    return default if given is None else [layer_type == "sliding_attention" for layer_type in given]
