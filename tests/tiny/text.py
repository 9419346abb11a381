"""Text models: Qwen3 and Mistral."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.tiny_models import (
    CHAT_SPECIALS,
    FIRST_SPECIAL,
    save_chat_tokenizer,
    save_generation,
    save_random,
    text_config,
)


def make_qwen3(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Qwen3: heads of 24 dimensions, which do not add up to the hidden size, with norms of queries and keys.

    `overrides` go to the config.
    """
    config = Qwen3Config(**{**text_config(tie_word_embeddings=True, head_dim=24), **overrides})
    save_random(Qwen3ForCausalLM(config), folder, seed)
    save_generation(folder, eos_token_id=[FIRST_SPECIAL + 2, FIRST_SPECIAL], pad_token_id=FIRST_SPECIAL)
    return save_chat_tokenizer(folder, CHAT_SPECIALS)


def make_mistral(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Mistral: a window of 16 tokens in all layers. `overrides` go to the config."""
    config = MistralConfig(**{**text_config(sliding_window=16, head_dim=24), **overrides})
    save_random(MistralForCausalLM(config), folder, seed)
    save_generation(folder, eos_token_id=FIRST_SPECIAL + 2, pad_token_id=FIRST_SPECIAL, bos_token_id=FIRST_SPECIAL)
    return save_chat_tokenizer(folder, CHAT_SPECIALS)
