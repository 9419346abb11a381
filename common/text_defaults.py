"""Defaults of transformers' configuration classes for decoders, for keys missing in config.json.

Published folders leave out what equals these: LLaVA-1.5 and Qwen2-Audio do not even say how many layers they have.
Kept here because transformers is slow to import; a test compares them with its classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_LARGE_7B: Final = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "rms_norm_eps": 1e-6}
_LLAMA: Final = {
    **_LARGE_7B,
    "vocab_size": 32_000,
    "intermediate_size": 11_008,
    "max_position_embeddings": 2048,
    "rope_theta": 1e4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN2: Final = {
    **_LARGE_7B,
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "rope_theta": 1e4,
}
_QWEN2_VL: Final = {
    "vocab_size": 152_064,
    "hidden_size": 8192,
    "intermediate_size": 29_568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
}
TEXT_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": _LLAMA,
    "mistral": {
        **_LLAMA,
        "intermediate_size": 14_336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    },
    "qwen2": _QWEN2,
    "qwen3": {**_QWEN2, "head_dim": 128},
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "mllama_text_model": {
        **_LLAMA,
        "vocab_size": 128_256,
        "intermediate_size": 14_336,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "bos_token_id": 128_000,
        "eos_token_id": 128_001,
        "pad_token_id": 128_004,
    },
    "qwen3_vl_text": {**_QWEN2, "head_dim": 128, "max_position_embeddings": 128_000, "rope_theta": 5e5},
}
"""By `model_type` of the decoder."""


def text_defaults(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the defaults for a config.json, nested or flat; empty for a decoder outside of the table."""
    nested = config.get("text_config") or {}
    kind = nested.get("model_type") or config.get("model_type") or ""
    return TEXT_DEFAULTS.get(kind) or TEXT_DEFAULTS.get(f"{kind}_text") or {}
