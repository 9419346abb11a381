"""Models that are measured by their shape: config.json of large ones and of toys, folders without any weights.

With `load_format="dummy"` the weights are drawn on the device. The tokenizer is the bundled model's with made-up words
up to the size of the vocabulary, so that every token that a random model generates has a text.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from common.model_info import BUNDLED

_BUNDLED: Final = BUNDLED / "signpost"
_TOKENIZER_FILES: Final = ("tokenizer_config.json", "chat_template.jinja")
EOS_TOKEN_ID: Final = 393
"""The bundled tokenizer's end of a turn."""
QWEN_MAX_PIXELS: Final = 16384 * 28 * 28
"""Of an image, as Qwen's own preprocessor has it: 4k images keep their size, those of 8k are scaled down."""


@dataclass(frozen=True)
class Shape:
    """A model's configuration and its preprocessor's, as their JSON files have them."""

    name: str
    config: dict[str, Any]
    preprocessor: dict[str, Any]

    def write(self, folder: Path) -> Path:
        """Make a model folder without weights; returns it."""
        folder.mkdir(parents=True, exist_ok=True)
        _write_json(folder / "config.json", self.config)
        _write_json(folder / "generation_config.json", {"eos_token_id": EOS_TOKEN_ID})
        if self.preprocessor:
            _write_json(folder / "preprocessor_config.json", self.preprocessor)
        for name in _TOKENIZER_FILES:
            shutil.copy(_BUNDLED / name, folder / name)
        bundled = json.loads((_BUNDLED / "tokenizer.json").read_text())
        _write_json(folder / "tokenizer.json", filled(bundled, _vocab_size(self.config)))
        return folder


def qwen2_5_vl_3b(*, toy: bool = False) -> Shape:
    """Qwen2.5-VL-3B; a toy has two layers of each kind of attention, and takes small images."""
    text = _text(toy=toy)
    text["rope_parameters"]["mrope_section"] = [2, 3, 3] if toy else [16, 24, 24]
    vision = {
        "model_type": "qwen2_5_vl",
        "hidden_act": "silu",
        "depth": 2 if toy else 32,
        "hidden_size": 32 if toy else 1280,
        "intermediate_size": 48 if toy else 3420,
        "num_heads": 2 if toy else 16,
        "out_hidden_size": text["hidden_size"],
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 56 if toy else 112,
        "fullatt_block_indexes": [1] if toy else [7, 15, 23, 31],
    }
    config = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "dtype": "bfloat16",
        "image_token_id": 403,
        "video_token_id": 404,
        "vision_start_token_id": 400,
        "vision_end_token_id": 401,
        "tie_word_embeddings": True,
        "text_config": text,
        "vision_config": vision,
    }
    preprocessor = json.loads((_BUNDLED / "preprocessor_config.json").read_text())
    preprocessor["max_pixels"] = 112 * 112 if toy else QWEN_MAX_PIXELS
    return Shape("Qwen2.5-VL-3B" if not toy else "a toy of Qwen2.5-VL", config, preprocessor)


def _text(*, toy: bool) -> dict[str, Any]:
    """The decoder of Qwen2.5-VL-3B, or one with the same grouping of heads and very little else."""
    return {
        "model_type": "qwen2_5_vl_text",
        "hidden_act": "silu",
        "vocab_size": 512 if toy else 151936,
        "hidden_size": 64 if toy else 2048,
        "intermediate_size": 96 if toy else 11008,
        "num_hidden_layers": 2 if toy else 36,
        "num_attention_heads": 4 if toy else 16,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024 if toy else 32768,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "bos_token_id": 391,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": 391,
    }


def _vocab_size(config: dict[str, Any]) -> int:
    return int((config.get("text_config") or config)["vocab_size"])


def filled(tokenizer: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """Return a tokenizer with made-up words up to the size of the vocabulary."""
    vocab = tokenizer["model"]["vocab"]
    # Those that are not in the vocabulary would be numbered anew, behind it.
    vocab |= {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    vocab |= {f"Ġw{index}": index for index in range(len(vocab), vocab_size)}
    return tokenizer


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))
