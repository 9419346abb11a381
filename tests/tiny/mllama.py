"""Mllama, as Llama 3.2 Vision: layers of cross-attention between those of self-attention, pictures in up to 4 tiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import MllamaConfig, MllamaForConditionalGeneration

from tests.tiny_models import (
    CHAT_SPECIALS,
    CHAT_TEMPLATE,
    FIRST_SPECIAL,
    save_chat_tokenizer,
    save_generation,
    save_random,
    text_config,
    write_json,
)

TILE_SIZE = 28
ROWS_PER_TILE = 5
IMAGE_TOKEN = FIRST_SPECIAL + len(CHAT_SPECIALS)
"""The first id beyond those that can be generated."""


def make_mllama(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Five layers, the second and the fourth of cross-attention. `overrides` go to the text config."""
    text = text_config(
        vocab_size=IMAGE_TOKEN,
        num_hidden_layers=5,
        cross_attention_layers=[1, 3],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_global_layers": 2,
        "attention_heads": 2,
        "intermediate_size": 64,
        "vision_output_dim": 3 * 32,
        "image_size": TILE_SIZE,
        "patch_size": TILE_SIZE // 2,
        "intermediate_layers_indices": [0, 2],
    }
    config = MllamaConfig(text_config={**text, **overrides}, vision_config=vision, image_token_index=IMAGE_TOKEN)
    save_random(MllamaForConditionalGeneration(config), folder, seed)
    save_generation(folder, eos_token_id=FIRST_SPECIAL + 2, pad_token_id=FIRST_SPECIAL, bos_token_id=FIRST_SPECIAL)
    size = {"height": TILE_SIZE, "width": TILE_SIZE}
    write_json(
        folder / "preprocessor_config.json",
        {"image_processor_type": "MllamaImageProcessor", "size": size, "max_image_tiles": 4},
    )
    save_chat_tokenizer(folder, (*CHAT_SPECIALS, "<|image|>"))
    template = CHAT_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|image|>")
    assert template != CHAT_TEMPLATE
    (folder / "chat_template.jinja").write_text(template)
    return folder
