"""Florence-2: DaViT over pictures of 64 pixels, five rows each, and BART."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import BartConfig, Florence2Config, Florence2ForConditionalGeneration

from tests.tiny.encdec import BART_GAINS, BOS, EOS, FIRST_LANGUAGE, PAD, bart_config, save_scaled, save_tokenizer
from tests.tiny_models import save_generation, write_json

SIDE, NUM_ROWS = 64, 5
LOCATIONS = tuple(f"<loc_{number}>" for number in range(20))
IMAGE_TOKEN_ID = FIRST_LANGUAGE + len(LOCATIONS)
RULES = {"forced_bos_token_id": BOS, "forced_eos_token_id": EOS, "no_repeat_ngram_size": 3}
"""As the published folders have them."""


def make_florence2(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """`overrides` go to the configuration of BART."""
    vision = {
        "depths": [1, 1, 2, 1],
        "embed_dim": [16, 16, 32, 32],
        "num_heads": [2, 2, 4, 4],
        "num_groups": [2, 2, 4, 4],
        "window_size": 3,
        "projection_dim": 64,
        "max_position_embeddings": 8,
    }
    text = {**bart_config(), "vocab_size": IMAGE_TOKEN_ID + 1, **overrides}
    config = Florence2Config(
        vision_config=vision, text_config=BartConfig(**text).to_dict(), image_token_id=IMAGE_TOKEN_ID
    )
    save_scaled(Florence2ForConditionalGeneration(config), folder, seed, BART_GAINS)
    ids = {"bos_token_id": BOS, "pad_token_id": PAD, "eos_token_id": EOS, "decoder_start_token_id": EOS}
    save_generation(folder, **ids, **RULES)
    size = {"height": SIDE, "width": SIDE}
    write_json(
        folder / "preprocessor_config.json",
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": size,
            "crop_size": size,
            "do_center_crop": False,
            "image_mean": [0.485, 0.456, 0.406],
            "image_std": [0.229, 0.224, 0.225],
            "image_seq_length": NUM_ROWS,
        },
    )
    save_tokenizer(folder, ("<s>", "<pad>", "</s>"), "<s> $A </s>", (*LOCATIONS, "<image>"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "extra_special_tokens": {"image_token": "<image>"},
        },
    )
    return folder
